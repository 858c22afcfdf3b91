"""Everything a run holds while it trains: policy, pool, queue, weight sync, telemetry. `train.py` is its only user.

Each method is collective over the trainer ranks unless it says otherwise. Rank 0 alone talks to the rollout
controller; the first rank of each data-parallel replica reads the queue; what they learn is broadcast.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch

from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.checkpoint.save.history import ROLLED_BACK, positions, roll_back
from megarl.checkpoint.save.resume import Candidate
from megarl.cluster.client import PoolClient, connect_ray
from megarl.cluster.handle import SupervisorHandle
from megarl.common.run_files import ExitRecord, Status, TerminationFlag, stop_reason, write_exit
from megarl.common.timeouts import GRACE_S
from megarl.config.layout import trainer_layout
from megarl.config.schema import Config
from megarl.data.tokenize import load_tokenizer
from megarl.models.export import HFExporter, save_hf
from megarl.models.read_config import load_info
from megarl.queue.dump import write_batch
from megarl.queue.sample_lines import choose_keys, sample_record
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.queue.transfer import QueueReader
from megarl.run.batch_metrics import record_batch
from megarl.run.peers import control_group, on_first_rank
from megarl.run.performance import Performance, peak_memory_gib
from megarl.run.step import StepPlan
from megarl.telemetry.declarations import step_metrics
from megarl.telemetry.sinks import MetricsWriter
from megarl.telemetry.summary import RunSummary
from megarl.telemetry.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer.policy import NonFiniteError, Policy
from megarl.weights.sender import WeightSender

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DisagreementError(RuntimeError):
    """Ranks computed different plans from the same tags: a bug, and nothing may be trained on it."""


@dataclass(frozen=True)
class Batch:
    """One step's batch as every rank knows it; `timings`: the controller's declared metrics."""

    step: int
    keys: list[str]
    tags: list[SampleTag]
    timings: dict[str, float]
    admitted: int


class Session:
    """Built on every rank after `torch.distributed` is up; `close` ends the pool.

    `launch`: the supervisor being started, on rank 0 only.
    """

    def __init__(self, config: Config, launch: Future[SupervisorHandle] | None, terminal: TextIO) -> None:
        self.config = config
        self.run_dir = config.run_dir
        self.rank = torch.distributed.get_rank()
        self._control = control_group(config)
        self.summary = RunSummary()
        self.writer = MetricsWriter.open(config, terminal) if self.rank == 0 else None
        self.metrics = step_metrics()
        self.timer = PhaseTimer()
        self._say("building the policy")
        info = load_info(config.model.path)
        layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
        parallel.initialize(layout, seed=config.run.seed, timeout_s=config.timeouts.collective_s)
        self.dp_size = parallel.dp_size()
        self.policy = Policy(config, layout, info)
        self.exporter = HFExporter(self.policy.module_chunks, info, self._export_dtype())
        self.performance = Performance(config, info)
        self.client: PoolClient | None = None
        self._tokenizer: Any = None
        self.reader: QueueReader | None = None
        self.sender: WeightSender | None = None
        self._totals = dict.fromkeys(("groups_admitted", "groups_trained", "groups_filtered"), 0.0)
        self._totals |= dict.fromkeys(
            ("groups_dropped_stale", "groups_failed", "trained_samples", "trained_tokens"), 0.0
        )
        # Why the run ends before `run.steps`; the same on every rank.
        self.stopped: str | None = None
        self.steps_done = 0
        self._termination = TerminationFlag()
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self.checkpointer = Checkpointer(config, self.policy, self._control, self._say)
        self._resumed = self.checkpointer.restore(self._prepare_resume)
        self.first_step = self._go_on_from(self._resumed)
        self._attach(launch)
        self._termination.install()

    def _prepare_resume(self, chosen: Candidate) -> None:
        """Rank 0, before anything is loaded: result files of this run's own history go back to the checkpoint."""
        if chosen.own:
            record = self.checkpointer.directory.state(chosen.step)
            if moved := roll_back(self.run_dir, record["files"]):
                self._say(f"{moved} records beyond step {chosen.step} moved to {self.run_dir / ROLLED_BACK}")

    def _go_on_from(self, record: dict[str, Any] | None) -> int:
        """Steps done by the history that this run goes on from; 0 for a new run."""
        if record is None:
            return 0
        self.summary.load_state_dict(record["summary"])
        self._totals |= record["totals"]
        if self.writer is not None:
            self.writer.roll_back(record["step"])
        return int(record["step"])

    def _attach(self, launch: Future[SupervisorHandle] | None) -> None:
        """Wait for the pool and form the weight-sync group with it."""
        self._say("waiting for the rollout engines")
        started = time.perf_counter()
        timeouts = self.config.timeouts

        def connect() -> tuple[SupervisorHandle, list[Any]]:
            assert launch is not None
            handle = launch.result(timeout=timeouts.ray_start_s + timeouts.node_s + GRACE_S / 2)
            if self.config.telemetry.samples_per_step:
                self._tokenizer = load_tokenizer(self.config.model.path)  # while the engines start
            self.client = PoolClient.connect(handle, self.config)
            self.client.begin(self._resumed["rollout"] if self._resumed else None)
            return handle, self.client.devices()

        handle, held = self._on_first_rank(connect)
        self._refuse_shared_devices(held)
        if parallel.is_leader():
            connect_ray(handle, timeouts.ray_start_s)
            self.reader = QueueReader.attach(handle.partition, namespace=handle.namespace, timeout_s=timeouts.queue_s)
        self._say(f"engines are up ({time.perf_counter() - started:.0f} s)")
        self.sender = WeightSender(self.config, self.exporter)
        self.sender.connect(self.client.engine_handles() if self.client is not None else None)

    def _refuse_shared_devices(self, held: list[Any]) -> None:
        """ValueError if a GPU that an engine holds is this rank's too."""
        from megarl.rollout.devices import own_device, refuse_overlap

        mine: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(mine, own_device(self.rank), group=self._control)
        refuse_overlap(mine, held)

    def start_clock(self) -> None:
        """Step 1 begins here: what start-up, version 0 and the first evaluation took belongs to no step."""
        # What start-up left behind is never garbage; walking it costs a rank 0.3 s, every few steps.
        gc.collect()
        gc.freeze()
        self.timer.finish_step()
        self.metrics.reduce()

    def steps(self, first: int = 0) -> Iterator[int]:
        """The steps from `first` on; ends early, with `stopped` set and a save made, when the run is asked to stop."""
        total = self.config.run.steps
        self.steps_done = first
        for step in range(first, total + 1):
            self.steps_done = step
            self.stopped = self._agree_to_stop()
            if self.stopped is not None:
                self._say(f"stopping after {step} of {total} steps: {self.stopped}")
                # Before that nothing has changed.
                if step > first and not self.save(step, wait=True):
                    self.steps_done = self.checkpointer.newest or 0  # where the next launch goes on from
                    self.stopped += f"; the checkpoint of step {step} could not be saved"
                return
            if step < total:
                yield step

    def _agree_to_stop(self) -> str | None:
        """Whether RUN_DIR/stop exists (rank 0 looks) or any rank got SIGTERM: one answer for all ranks."""
        asked = self._termination.raised or (self.rank == 0 and stop_reason(self.run_dir) is not None)
        flag = torch.tensor([int(asked)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._control)
        if not flag.item():
            return None
        return self._on_first_rank(lambda: stop_reason(self.run_dir) or "SIGTERM")

    def take_batch(self, step: int) -> Batch:
        """The finished groups of `step`, known to every rank by their tags."""
        config = self.config
        with self.timer.phase("generate"):
            self._status(f"step {step + 1}/{config.run.steps}: generating")
            ready = self._on_first_rank(lambda: self._client.wait_batch(step))
        with self.timer.phase("queue"):
            tags = self.reader.read_tags(ready.keys) if self.reader is not None else None
            tags = parallel.model_parallel_broadcast_object(tags)
        self._status(f"step {step + 1}/{config.run.steps}: training")
        return Batch(step, ready.keys, tags, ready.timings, ready.counters.admitted)

    def fetch(self, batch: Batch, plan: StepPlan) -> dict[str, Trajectory]:
        """This replica's rows by key. Raises DisagreementError if the replicas do not share one plan."""
        with self.timer.phase("queue"):
            hashes = set(parallel.dp_all_gather_object(plan.hash))
            if len(hashes) != 1:
                raise DisagreementError(f"step {batch.step}: DP ranks planned differently: {sorted(hashes)}")
            rows = None
            if self.reader is not None:
                rows = {row.key: row for row in self.reader.fetch(plan.keys_of(parallel.dp_rank()))}
            rows = parallel.model_parallel_broadcast_object(rows)
            if self.config.telemetry.dump_batches:
                self._dump(self.run_dir / "batches", batch)
        return rows

    @contextmanager
    def keep_batch_on_failure(self, batch: Batch) -> Iterator[None]:
        """A loss or gradient that is not finite stops the run; the batch that did it is kept for `megarl replay`."""
        try:
            yield
        except NonFiniteError as error:
            directory = self.run_dir / "failed_batch"
            self._dump(directory, batch)
            # All ranks raise it. The first one to end has torchrun end the others: not before their part is written.
            torch.distributed.barrier(self._control)
            raise NonFiniteError(f"step {batch.step}: {error}; the batch is kept in {directory}") from error

    def commit(self, batch: Batch, plan: StepPlan) -> None:
        """Tell the controller what became of every group; it frees the rows and may admit new ones."""
        outcome = plan.outcome
        if self.reader is not None and self.writer is not None:
            self._write_samples(batch)  # while the rows are still in the queue
        if self.client is not None:
            self.client.commit(
                batch.step,
                trained=outcome.trained,
                filtered=outcome.filtered,
                dropped_stale=outcome.dropped_stale,
                failed=outcome.failed,
            )

    def publish(self, version: int) -> None:
        """Every engine serves `version` from here on."""
        assert self.sender is not None
        self._status(f"publishing version {version}")
        with self.timer.phase("sync"):
            report = self.sender.publish(version)
            self.metrics.update(
                {
                    "seconds": report.seconds,
                    "digest_seconds": report.digest_seconds,
                    "bytes": report.bytes,
                    "buckets": report.buckets,
                    "version": version,
                    "restarted_replicas": len(report.restarted),
                },
                prefix="sync/",
            )
        if self.client is not None:
            self.client.set_version(version, admit=False)

    def admit(self) -> None:
        """Start every group that the published version allows."""
        if self.client is not None:
            self.client.admit()

    def evaluation_due(self, steps_done: int) -> bool:
        """After so many steps, the last one left out (it is evaluated anyhow)."""
        every = self.config.evaluation.every
        return bool(every) and steps_done % every == 0 and steps_done < self.config.run.steps

    def evaluate(self, label: str) -> None:
        """Evaluate all sets on the pool; answers go to RUN_DIR/eval_{label}.jsonl."""
        if not self.config.evaluation.sets:
            return
        with self.timer.phase("eval"):
            self._status(f"evaluating ({label})")
            version = int(label.removeprefix("step_")) if label.startswith("step_") else None
            version = version if version is not None else (0 if label == "before" else self.config.run.steps)
            reports = self._on_first_rank(lambda: self._client.evaluate(version, label))
        if self.writer is None:
            return
        from megarl.evaluation.table import render_line

        record = self.summary.eval_before if label == "before" else self.summary.eval_after
        record(reports[0].greedy.mean.value, reports[0].sampled.mean.value, reports[0].n)
        self._evaluated = (version, {name: value for report in reports for name, value in report.metrics().items()})
        for report in reports:
            self.writer.progress.message(render_line(label, report))
            self.writer.write(version, report.metrics(), terminal=False)

    def log_step(self, batch: Batch, plan: StepPlan) -> None:
        """Close the step's clock and write its metrics."""
        record_batch(self.metrics, plan)
        self.metrics.update(batch.timings)
        values = self.metrics.reduce()
        values |= self.timer.finish_step(values.get("rollout/engine_seconds", 0.0))
        values |= self.performance.of_step(values)
        values["perf/trainer_peak_memory_gib"] = peak_memory_gib(self._control)
        values |= self._count(values)
        steps_done = batch.step + 1
        values["time/eta"] = values["total/wall_seconds"] / steps_done * (self.config.run.steps - steps_done)
        self.summary.step(values)
        if self.writer is not None:
            self.writer.write(steps_done, values)
            self.summary.write(self.run_dir / "summary.json", "running")

    def checkpoint(self, steps_done: int) -> None:
        """Step boundary: complete the save that is running in the background, start the one that is due."""
        with self.timer.phase("save"):
            self.checkpointer.poll()
        if self.checkpointer.due(steps_done):
            self.save(steps_done)

    def save(self, steps_done: int, *, wait: bool = False) -> bool:
        """Save a checkpoint now, whatever is due; with `wait`, return when it is complete. False if it failed."""
        with self.timer.phase("save"):
            record = self._on_first_rank(lambda: self._record(steps_done))
            return self.checkpointer.save(steps_done, record, wait=wait)

    def _record(self, steps_done: int) -> dict[str, Any]:
        """What a checkpoint holds of rank 0, the controller and the result files."""
        evaluated, metrics = self._evaluated
        return {
            "rollout": self._client.state_dict(),
            "summary": self.summary.state_dict(),
            "totals": self._totals,
            "files": positions(self.run_dir),
            "metrics": metrics if evaluated == steps_done else {},
        }

    def export(self) -> None:
        """Write the policy to RUN_DIR/hf in Hugging Face format."""
        if self.config.run.export:
            self._status("exporting")
            with self.timer.phase("save"):
                save_hf(self.exporter, self.config.model.path, self.run_dir / "hf", overwrite=True, group=self._control)
            self._say(f"final policy: {self.run_dir / 'hf'}")

    def finish(self) -> None:
        """Complete the running save; write RUN_DIR/summary.json and RUN_DIR/exit.json (rank 0).

        The status is finished, or preempted if `stopped`: then an export that is running is ended, there is no time.
        """
        self.checkpointer.poll(wait=True)
        if self.writer is not None:
            status: Status = "finished" if self.stopped is None else "preempted"
            record = ExitRecord(status, self.steps_done, self.stopped or "")
            self.summary.write(self.run_dir / "summary.json", record.status)
            write_exit(self.run_dir, record)
        self.checkpointer.finish(export_s=self.config.timeouts.save_s if self.stopped is None else 0.0)

    def close(self, *, keep_pool: bool = False) -> None:
        """Leave the weight-sync group and end the pool (unless kept); bounded, and safe after a failure."""
        for each in (self.sender, self.reader, None if keep_pool else self.client, self.writer):
            if each is not None:
                each.close()

    @property
    def _client(self) -> PoolClient:
        assert self.client is not None, "only rank 0 talks to the rollout controller"
        return self.client

    def _on_first_rank(self, function: Callable[[], T]) -> T:
        return on_first_rank(self._control, function)

    def _export_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.trainer.precision == "bf16" else torch.float32

    def _dump(self, directory: Path, batch: Batch) -> None:
        """Each DP leader writes its share of the whole batch, filtered groups too."""
        if self.reader is not None:
            rank = parallel.dp_rank()
            rows = self.reader.fetch(batch.keys[rank :: self.dp_size])
            write_batch(directory, batch.step, batch.step, rows, part=rank, parts=self.dp_size)

    def _write_samples(self, batch: Batch) -> None:
        assert self.reader is not None and self.writer is not None and self.client is not None
        keys = choose_keys(batch.keys, self.config.telemetry.samples_per_step, self.config.run.seed, batch.step)
        rows = self.reader.fetch(keys)
        references = self.client.references([row.group_id for row in rows])
        for row in rows:
            record = sample_record(batch.step + 1, row, self._tokenizer.decode, references.get(row.group_id))
            self.writer.sample(batch.step + 1, record)

    def _count(self, values: dict[str, float]) -> dict[str, float]:
        for name in ("admitted", "trained", "filtered", "dropped_stale", "failed"):
            self._totals[f"groups_{name}"] += values[f"groups/{name}"]
        for name in ("trained_samples", "trained_tokens"):
            self._totals[name] += values[f"batch/{name}"]
        totals = {f"total/{name}": value for name, value in self._totals.items()}
        return totals | {"total/wall_seconds": self.summary.wall_seconds}

    def _say(self, text: str) -> None:
        if self.writer is not None:
            self.writer.progress.message(text)

    def _status(self, text: str) -> None:
        if self.writer is not None:
            self.writer.progress.status(text)
