"""Everything that a run writes about itself: metrics, totals, samples, evaluations, summary and exit record.

Every rank has a recorder, because every rank measures; only the one of rank 0 writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from megarl.chat.tokenize import load_tokenizer
from megarl.checkpoint.save.history import ROLLED_BACK, positions, roll_back
from megarl.common.process.memory_tuning import end_start
from megarl.common.rundir.notices import NoticeWatch
from megarl.common.rundir.run_files import ExitRecord
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.evaluation.table import render_line
from megarl.models.architecture.architecture import ModelInfo
from megarl.queue.sample_lines import choose_keys, sample_record
from megarl.queue.trajectory import Trajectory
from megarl.rollout.admission.counters import Counters
from megarl.run.ranks.control_group import ControlGroup
from megarl.run.record.batch_metrics import Performance, nothing_trained, peak_memory_gib, record_batch
from megarl.run.record.events import StepEvents, end_of_history
from megarl.run.step.plan import CountersDiffer, StepPlan
from megarl.telemetry.metrics.declarations import step_metrics
from megarl.telemetry.metrics.summary import RunSummary
from megarl.telemetry.metrics.timer import Phase, PhaseTimer
from megarl.telemetry.monitor import RUN, Alarm
from megarl.telemetry.sinks.sinks import MetricsWriter
from megarl.telemetry.trace import events
from megarl.weights.plan.settings import SyncReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The parts of a run whose state a checkpoint keeps in addition to the trainer's own.


class Stateful(Protocol):
    """A part whose state is JSON, stored in the checkpoint's record under `key`."""

    key: str

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store. Called on rank 0."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a stored state. Called on every rank."""
        ...


def collect(parts: Iterable[Stateful]) -> dict[str, Any]:
    """Return the states of all parts by key. Raises ValueError if two parts share a key."""
    record: dict[str, Any] = {}
    for part in parts:
        if part.key in record:
            raise ValueError(f"two parts of the run store their state under {part.key!r}")
        record[part.key] = part.state_dict()
    return record


def restore(parts: Iterable[Stateful], record: Mapping[str, Any]) -> None:
    """Load the state of every part from a record that `collect` made. Raises KeyError if one is missing."""
    for part in parts:
        part.load_state_dict(record[part.key])


class Totals:
    """Sums over the committed history, reported as `total/*` metrics."""

    key = "totals"
    GROUPS = ("admitted", "trained", "filtered", "dropped_stale", "failed", "reused")
    BATCH = ("trained_samples", "trained_tokens")

    def __init__(self) -> None:
        self._sums = dict.fromkeys((*(f"groups_{name}" for name in self.GROUPS), *self.BATCH), 0.0)

    def add(self, values: dict[str, float]) -> dict[str, float]:
        """Add the metrics of one step and return the sums under their metric names."""
        for name in self.GROUPS:
            self._sums[f"groups_{name}"] += values[f"groups/{name}"]
        for name in self.BATCH:
            self._sums[name] += values[f"batch/{name}"]
        return {f"total/{name}": value for name, value in self._sums.items()}

    def compare(self, steps: int, counted: Counters) -> None:
        """Raise CountersDiffer unless the rollout side settled the same numbers of groups in `steps` steps."""
        theirs = {"admitted": counted.settled} | {name: getattr(counted, name) for name in self.GROUPS[1:]}
        ours = {name: int(self._sums[f"groups_{name}"]) for name in self.GROUPS}
        if ours != theirs:
            raise CountersDiffer(
                f"after {steps} steps the trainer has counted the groups {ours}, and rollout {theirs}: groups were "
                f"lost or trained twice; the run ends because its results cannot be trusted"
            )

    def state_dict(self) -> dict[str, float]:
        """Return the sums."""
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from saved sums."""
        self._sums |= state


class LastEvaluation:
    """The metrics of the newest evaluation, if it used the weights that are saved (for `checkpoint.keep_best`)."""

    key = "metrics"

    def __init__(self) -> None:
        self._version: int | None = None
        self._metrics: dict[str, float] = {}
        self.current = 0  # the version of the policy's weights

    def record(self, version: int, metrics: dict[str, float]) -> None:
        """Keep the metrics of an evaluation of the weights of `version`."""
        self._version, self._metrics = version, metrics

    def state_dict(self) -> dict[str, float]:
        """Return the metrics; empty if they are of other weights."""
        return self._metrics if self._version == self.current else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing: the next checkpoint holds later weights, which these metrics do not describe."""


class ResultFiles:
    """The positions up to which the result files belong to the committed history.

    A resume truncates the files there before it loads anything (`checkpoint/save/history.py`).
    """

    key = "files"

    def __init__(self, run_dir: Path, waiting: Callable[[], Mapping[str, int]] = dict) -> None:
        """`waiting`: writes all lines, and returns the bytes that a full disk refused, by file name."""
        self._run_dir, self._waiting = run_dir, waiting

    def state_dict(self) -> dict[str, int]:
        """Return the current position of each file, in bytes."""
        waiting = self._waiting()
        return {name: position + waiting.get(name, 0) for name, position in positions(self._run_dir).items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing: the files are already truncated."""


def _replica_of(subject: int) -> int | None:
    """Return the replica that a rule of the monitor judges; None for the run."""
    return None if subject == RUN else subject


class Recorder:
    """Collects the current step in `metrics` and `timer`; `step` closes it and writes it."""

    def __init__(self, config: Config, peers: ControlGroup, terminal: TextIO) -> None:
        self._config, self._peers = config, peers
        self._run_dir = config.run_dir
        self._writer = MetricsWriter.open(config, terminal) if peers.is_first else MetricsWriter.silent()
        self._notices = NoticeWatch(self._run_dir, self.say) if peers.is_first else None
        self.metrics = step_metrics()
        self._events = StepEvents()
        self.timer = PhaseTimer(time.monotonic, self._events.phase)
        self.summary = RunSummary()
        self._totals = Totals()
        self._evaluated = LastEvaluation()
        self._performance: Performance | None = None
        self._untrained = False  # whether the last step has trained nothing
        self._begun = (0, time.monotonic())  # steps done when the clock was started, and that time
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def parts(self) -> Sequence[Stateful]:
        """The recorder's parts that a checkpoint keeps."""
        return (self.summary, self._totals, ResultFiles(self._run_dir, self._writer.waiting), self._evaluated)

    @property
    def evaluated(self) -> dict[str, float]:
        """The metrics of the newest evaluation; empty unless it was of the present weights."""
        return self._evaluated.state_dict()

    def describe_model(self, info: ModelInfo) -> None:
        """Set the model whose throughput is measured. Call it when the platform is active."""
        self._performance = Performance(self._config, info)

    def load_tokenizer(self) -> None:
        """Load the tokenizer that decodes samples. On rank 0."""
        if self._config.telemetry.samples_per_step:
            self._tokenizer = load_tokenizer(self._config.model.path)

    def say(self, text: str) -> None:
        """Print a line for the user."""
        self._writer.progress.message(text)

    def show_notices(self) -> None:
        """Print new notices of other processes, within 5 s."""
        if self._notices is not None:
            self._notices.show_new()

    def alarm(self, alarm: Alarm) -> None:
        """Record that an alarm of the monitor begins in this step. Only rank 0 writes it."""
        if self._peers.is_first:
            step, replica = self._events.step, _replica_of(alarm.subject)
            events.fault("alarm", alarm.text, replica=replica, step=step, rule=alarm.rule.name)

    def alarm_ended(self, rule: str, subject: int, how: str) -> None:
        """Record that the alarm of a rule about a replica, or the run, ends in this step. Only rank 0 writes it."""
        if self._peers.is_first:
            events.recovery("alarm", how, replica=_replica_of(subject), step=self._events.step, rule=rule)

    def status(self, text: str) -> None:
        """Show the current activity on the live line of a terminal."""
        self._writer.progress.status(text)

    @contextmanager
    def phase(self, name: Phase, status: str = "") -> Iterator[None]:
        """Count the time of the block as phase `name` of the step, and show `status`."""
        if status:
            self.status(status)
        with self.timer.phase(name):
            yield

    def start_clock(self, steps_done: int = 0) -> None:
        """Begin the first step. Start-up, the publication of version 0 and the first evaluation belong to no step.

        `steps_done`: those of the history that the run resumes.
        """
        end_start()
        self._begun = (steps_done, time.monotonic())
        self._events.begin(steps_done + 1)
        self.timer.finish_step()
        self.metrics.reduce()

    def sync(self, version: int, report: SyncReport) -> None:
        """Record the publication of a version."""
        self._evaluated.current = version
        self.metrics.update(
            {
                "seconds": report.seconds,
                "pause_seconds": report.pause_seconds,
                "digest_seconds": report.digest_seconds,
                "bytes": report.bytes,
                "buckets": report.buckets,
                "version": version,
                "restarted_replicas": len(report.restarted),
            },
            prefix="sync/",
        )

    def sample_keys(self, step: int, plan: StepPlan) -> list[str]:
        """Choose the trajectories that `samples` writes, of those that no earlier step had; return their keys."""
        keys = [tag.key for tag in plan.new_tags]
        return choose_keys(keys, self._config.telemetry.samples_per_step, self._config.run.seed, step)

    def samples(self, step: int, rows: Sequence[tuple[Trajectory, str | None]]) -> None:
        """Append trajectories, with reference answers, to samples.jsonl."""
        for row, reference in rows:
            assert self._tokenizer is not None  # load_tokenizer loads it wherever there are rows
            record = partial(sample_record, step + 1, row, self._tokenizer.decode, reference)
            self._writer.sample(step + 1, record)

    def step(
        self, step: int, plan: StepPlan, timings: Mapping[str, float], trained: Set[int], version: int,
        counted: Counters | None,
    ) -> None:  # fmt: skip
        """Close the step's clock and write its metrics. Collective. `version`: that of the weights after the step.

        `timings`: the controller's metrics of the batch. `trained`: ids of the groups that the step has trained, as its
        backward passes have counted them. `counted`: what the rollout side has counted, on rank 0. Raises
        CountersDiffer if the trainer has not.
        """
        assert self._performance is not None
        self._evaluated.current = version
        record_batch(self.metrics, plan, trained)
        self.metrics.update(timings)
        values = self.metrics.reduce()
        values |= self.timer.finish_step(values.get("rollout/engine_seconds", 0.0))
        self._events.finish_step()
        values |= self._performance.of_step(values)
        values["perf/trainer_peak_memory_gib"] = peak_memory_gib(self._peers.group)
        values |= self._totals.add(values)
        if self._writer.failures:
            values["total/failed_writes"] = self._writer.failures
        if lost := events.lost_events():
            values["total/lost_events"] = lost
        values["total/wall_seconds"] = self.summary.wall_seconds
        steps_done = step + 1
        untrained = nothing_trained(plan)
        if untrained and not self._untrained:  # the first one in a row
            self.say(f"step {steps_done}: {untrained}")
        self._untrained = bool(untrained)
        made = max(1, steps_done - self._begun[0])  # by this start of the run, without its start-up
        values["time/eta"] = (time.monotonic() - self._begun[1]) / made * (self._config.run.steps - steps_done)
        self.summary.step(values)
        self._writer.write(steps_done, values)
        self._writer.write_summary(self.summary, "running")
        if counted is not None:
            self._totals.compare(steps_done, counted)

    def evaluation(
        self, steps_done: int, version: int, label: str, reports: Sequence[SetReport], *,
        written_at: int | None = None, began: float | None = None,
    ) -> None:  # fmt: skip
        """Record and print an evaluation, one report per set, that began after `steps_done` steps with `version`.

        `written_at`: the step under which its metrics are written, if training continued meanwhile. It is the step at
        its end, because sinks need steps in order, and a resume discards what was written after its checkpoint.
        `began`: its start, by `time.monotonic`.
        """
        if began is not None and self._peers.is_first:
            events.record(
                "evaluation", began, time.monotonic(), step=steps_done, version=version,
                args={"label": label, "alongside_training": int(written_at is not None)},
            )  # fmt: skip
        first = reports[0]
        self.summary.evaluation(label, first.greedy.mean.value, first.sampled.mean.value, first.n, first.reward_errors)
        if all(report.of_one_version for report in reports):
            self._evaluated.record(version, {key: value for each in reports for key, value in each.metrics().items()})
        for report in reports:
            self.say(render_line(label, report))
            values = report.metrics() | {"eval/step": steps_done, "eval/version": version}
            values |= {"eval/oldest_version": report.oldest, "eval/newest_version": report.newest}
            self._writer.write(steps_done if written_at is None else written_at, values, terminal=False)

    def cut_result_files(self, step: int, positions: dict[str, int]) -> None:
        """Truncate the result files to their positions at the checkpoint of `step`. On rank 0."""
        if moved := roll_back(self._config.run_dir, positions):
            self.say(f"{moved} records beyond step {step} moved to {self._config.run_dir / ROLLED_BACK}")

    def roll_back(self, step: int) -> None:
        """Note that the run resumes from `step`."""
        self._writer.roll_back(step)
        if self._peers.is_first:
            events.mark("rolled_back", step=step, args={"since": end_of_history(self._run_dir)})

    def finish(self, record: ExitRecord) -> None:
        """Write RUN_DIR/summary.json and RUN_DIR/exit.json."""
        self._writer.write_summary(self.summary, record.status)
        self._writer.write_exit(record)

    def close(self) -> None:
        """Show the last notices of the pool, and close the metric files."""
        if self._notices is not None:
            self._notices.close()
        self._writer.close()
