"""The session: builds and connects the parts of a run: policy, pool, weight sync, recorder, checkpoints.

Every method is collective over the trainer ranks.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TextIO

import torch

from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.checkpoint.save.resume import Candidate
from megarl.cluster.pool.pool_process import SupervisorHandle
from megarl.common.errors import ConfigError
from megarl.common.rundir.run_files import ExitRecord, Status
from megarl.common.trust.object_collectives import JSON
from megarl.config.derived.pools import trainer_layout
from megarl.config.memory_plan.shared_gpus import SharedMemory
from megarl.config.schema import Config
from megarl.models.hf.export import HFExporter, save_hf
from megarl.models.hf.read_config import load_info
from megarl.run.loop.batches import BatchSource
from megarl.run.loop.evaluations import Evaluations
from megarl.run.loop.monitor import MOST_SKIPPED_BY_ALARMS, AlarmSkipsStep, AlarmStopsRun, RunMonitor
from megarl.run.loop.rollout_client import RolloutClient
from megarl.run.loop.shared_gpus import SharedGpus
from megarl.run.loop.stop import StopSignals, StopVote
from megarl.run.ranks.control_group import ControlGroup
from megarl.run.record.recorder import Recorder, Stateful, collect, restore
from megarl.run.step.plan import StepPlan
from megarl.telemetry.trace import events
from megarl.trainer import parallel
from megarl.trainer.policy import Policy, StepRefused
from megarl.weights.group.store import store_address
from megarl.weights.plan.settings import SyncSettings
from megarl.weights.send.sender import WeightSender


class LastSaveFailed(RuntimeError):  # noqa: N818
    """The run has trained all its steps but could not save the last one."""


class Session:
    """Holds the parts of a run on every rank, once `torch.distributed` is initialised; `close` ends the pool.

    `launch`: the supervisor that is being started, on rank 0 only. `planned`: the memory of shared GPUs. `first_step`:
    training steps done by the history that this run resumes; 0 for a new run. `version`: the version of the policy's
    weights (`megarl/config/derived/staleness.py`).
    """

    def __init__(
        self,
        config: Config,
        launch: Future[SupervisorHandle] | None,
        terminal: TextIO,
        signals: StopSignals,
        planned: SharedMemory | None = None,
    ) -> None:
        self.config = config
        self.peers = ControlGroup(config.timeouts)
        self._refuse_different_plans()
        self.recorder = Recorder(config, self.peers, terminal)
        self.pool = RolloutClient(config, self.peers, self.recorder)
        if config.rollout.share_gpus:
            # vLLM measures the GPU's memory while an engine starts, and fails if it is not free.
            self.recorder.say("waiting for the rollout engines, which start before the policy is built")
            self.pool.await_sleeping_engines(launch)
        self.recorder.say("building the policy")
        info = load_info(config.model.path)
        layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
        parallel.initialize(layout, seed=config.run.seed, timeout_s=config.timeouts.collective_s)
        self.policy = Policy(config, layout, info)
        self.recorder.describe_model(info)
        dtype = torch.bfloat16 if config.trainer.precision == "bf16" else torch.float32
        self._exporter = HFExporter(self.policy.module_chunks, info, dtype)
        self.batches = BatchSource(config, self.peers, self.recorder)
        self._stop_vote = StopVote(config.run_dir, self.peers, signals)
        self.evaluations = Evaluations(config, self.pool, self.recorder, self._stop_vote.asked)
        self.gpus = SharedGpus(
            self.policy, self.peers, self.recorder, self.pool.engine_handles, planned,
            shared=config.rollout.share_gpus, rpc_s=config.timeouts.rpc_s,
        )  # fmt: skip
        self.monitor = RunMonitor(config.monitor, self.pool, self.recorder, lambda: self.gpus.residue.values)
        settings = SyncSettings.of(config.weight_sync, config.timeouts, config.run_dir, asleep=self.gpus.shared)
        self.sender = WeightSender(
            settings, self._exporter, host=store_address(config.ray), aside=self.gpus.aside,
            frozen=self.policy.frozen_tensors,
        )  # fmt: skip
        self.checkpointer = Checkpointer(config, self.policy, self.peers.group, self.recorder.say)
        self.stopped: str | None = None  # why the run stops before `run.steps`; the same on every rank
        self.unsaved_steps = 0  # trained but lost, because the save at the stop failed
        self.version = self.skipped_steps = self.skipped_by_alarms = 0
        self.first_step = self.steps_done = self._resume()
        self._connect(launch)
        self._stop_vote.install()

    @property
    def parts(self) -> Sequence[Stateful]:
        """The parts whose state a checkpoint holds in addition to the trainer's own."""
        return (self.pool, *self.recorder.parts, self.evaluations, self.monitor)

    def _refuse_different_plans(self) -> None:
        """Raise ConfigError if the ranks have resolved `auto` differently: their collectives would not match."""
        trainer = self.config.trainer
        chosen = self.peers.gather((trainer.recompute, trainer.micro_batch_tokens), JSON)
        if len(set(map(tuple, chosen))) > 1:
            raise ConfigError(
                [
                    "trainer.recompute, trainer.micro_batch_tokens: the trainer's GPUs differ in memory, so the ranks "
                    f"would use {sorted(set(map(str, chosen)))}; set trainer.device_memory_gib to that of the smallest"
                ]
            )

    def _resume(self) -> int:
        """Load the checkpoint that `checkpoint.resume` names, if any; return the steps done by its history."""

        record = self.checkpointer.restore(self._cut_result_files)
        if record is None:
            return 0
        # Checkpoints of earlier releases have no record of evaluations, for which those releases waited, and no
        # monitor.
        restore(self.parts, {self.evaluations.key: {}, self.monitor.key: {}, **record})
        self.recorder.roll_back(record["step"])
        self.version = int(record["version"])
        if (step := int(record["step"])) >= (total := self.config.run.steps):
            self.recorder.say(f"the checkpoint has {step} steps and run.steps is {total}: nothing is left to train")
        return step

    def _cut_result_files(self, chosen: Candidate) -> None:
        """Truncate the result files to the checkpoint, if it is of this run. Rank 0, before anything is loaded."""
        if chosen.own:
            self.recorder.cut_result_files(chosen.step, self.checkpointer.directory.state(chosen.step)["files"])

    def _connect(self, launch: Future[SupervisorHandle] | None) -> None:
        """Wait for the pool and form the weight-sync group with its engines."""
        self.recorder.say("waiting for the rollout engines")
        started = time.perf_counter()
        with self.gpus.aside():  # for engines left in the middle of a weight sync, which are replaced now
            handle = self.pool.attach(launch)
            self.batches.attach(handle, self.pool.controller)
        self.recorder.say(f"engines are up ({time.perf_counter() - started:.0f} s)")
        self.sender.connect(self.pool.engine_handles())

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps. After a stop request, save, set `stopped` and end."""
        total = self.config.run.steps
        for step in range(self.first_step, total + 1):
            self.steps_done = step
            self.stopped = self._stop_reason()
            if self.stopped is not None:
                self._save_stopped(step)
                return
            if step < total:
                yield step

    def stop_before_the_end(self) -> None:
        """Set `stopped` and save, because a stop request has ended the evaluation after the last step.

        With `checkpoint.every` the last step is already saved, or being saved. A resumed run continues there.
        """
        self.stopped = self._stop_reason()
        self._save_stopped(self.config.run.steps)

    def _stop_reason(self) -> str | None:
        """Return why the run stops here; None if it continues. Collective."""
        withdrawn = "a stop request that was withdrawn" if self.evaluations.ended_by_stop else None
        return self._stop_vote.agree() or withdrawn

    def _save_stopped(self, step: int) -> None:
        """Save the step at which the run stops. If that fails, `steps_done` is where the next launch resumes."""
        self.recorder.say(f"stopping after {step} of {self.config.run.steps} steps: {self.stopped}")
        # Before the first step of this start there is nothing to save.
        if step > self.first_step and not self.save(step, wait=True):
            self.steps_done = max(self.checkpointer.newest or 0, self.first_step)
            self.unsaved_steps = step - self.steps_done
            self.stopped = f"{self.stopped}; {self.checkpointer.failure}"
        elif step:
            self.recorder.say(f"step {step} is saved; the same command resumes from there")

    def skip(self, error: StepRefused, plan: StepPlan) -> StepPlan:
        """Return the plan of a step that is skipped because of `error`, or raise `error` if it may not be skipped.

        It may be skipped if it has made no update and `trainer.max_skipped_steps`, or for an alarm
        MOST_SKIPPED_BY_ALARMS, allows it. An alarm that stops the run first saves the last step.
        """
        by_alarm = isinstance(error, AlarmSkipsStep)
        if isinstance(error, AlarmStopsRun):
            self._save_before_failure()
            raise error
        most = MOST_SKIPPED_BY_ALARMS if by_alarm else self.config.trainer.max_skipped_steps
        done = self.skipped_by_alarms if by_alarm else self.skipped_steps
        skipped = plan.skipped() if not error.updates and done < most else None
        if skipped is None:
            raise error
        self.skipped_by_alarms += by_alarm
        self.skipped_steps += not by_alarm
        self.recorder.say(f"{error}; the step is skipped ({done + 1} of at most {most})")
        if self.peers.is_first:
            events.fault("step", str(error), step=self.steps_done + 1)
        return skipped

    def _save_before_failure(self) -> None:
        """Save the steps before the current one, which has changed no weight, unless already done."""
        step = self.steps_done
        if step > self.first_step and self.checkpointer.newest != step:
            self.save(step, wait=True)

    def refresh_reference(self, steps_done: int) -> None:
        """Give the reference policy the weights after `steps_done` steps, if due. Called before the next step."""
        with self.recorder.phase("update"):
            refreshed = self.policy.refresh_reference(steps_done)
        if refreshed:
            self.recorder.say(f"the reference policy has the weights after {steps_done} steps")

    def copy_state(self, steps_done: int) -> None:
        """Copy the trainer's state for the save after this step, if engines will have the GPUs by then."""
        if self.gpus.shared and self.checkpointer.due(steps_done):
            with self.recorder.phase("save"):
                self.checkpointer.copy(steps_done)

    def checkpoint(self, steps_done: int) -> None:
        """Complete the running background save, and start one if it is due. Called between steps."""
        with self.recorder.phase("save"):
            self.checkpointer.poll()
            if self.checkpointer.newest is not None:
                self.pool.saved(self.checkpointer.newest)
        has_copy = self.checkpointer.has_copy(steps_done)
        if has_copy or (not self.gpus.shared and self.checkpointer.due(steps_done)):
            self.save(steps_done)

    def save(self, steps_done: int, *, wait: bool = False) -> bool:
        """Save a checkpoint, due or not; with `wait`, return when it is complete. False if it failed."""
        self.evaluations.collect(steps_done)
        if not self.checkpointer.has_copy(steps_done):
            self.gpus.train()
        with self.recorder.phase("save"):
            record = {"version": self.version} | self.peers.on_first_rank(lambda: collect(self.parts), JSON)
            return self.checkpointer.save(steps_done, record, wait=wait)

    def keep_evaluation(self) -> None:
        """Add the evaluation of the present weights to their checkpoint, if that was saved before it ended."""
        if not self.unsaved_steps:  # otherwise they have no checkpoint
            self.checkpointer.add_evaluation(self.steps_done, self.recorder.evaluated)

    def export(self) -> None:
        """Write the policy to RUN_DIR/hf in Hugging Face format."""
        if self.config.run.export:
            self.gpus.train()
            target = self.config.run_dir / "hf"
            with self.recorder.phase("save", "exporting"):
                save_hf(self._exporter, self.config.model.path, target, overwrite=True, group=self.peers.group)
            self.recorder.say(f"final policy: {target}")

    def finish(self) -> None:
        """Complete the running save and record how the run ended: finished, or preempted if `stopped` is set.

        Raises LastSaveFailed if the run is finished but its last checkpoint is not.
        """
        self.batches.finish()
        self.checkpointer.poll(wait=True)
        self.recorder.summary.failed_saves = self.checkpointer.failed_saves
        if self.stopped is None and self.checkpointer.failure is not None:
            reason = f"all {self.steps_done} steps are trained, but {self.checkpointer.failure}"
            self.recorder.finish(ExitRecord("failed", self.checkpointer.newest or 0, reason))
            raise LastSaveFailed(reason)
        self.keep_evaluation()
        status: Status = "finished" if self.stopped is None else "preempted"
        self.recorder.finish(ExitRecord(status, self.steps_done, self.stopped or "", self.unsaved_steps))
        self.recorder.say(f"a page about the run: megarl report {self.config.run_dir}")

    @property
    def lost_its_stop(self) -> bool:
        """True if the run stopped on request and could not save its last step."""
        return self.stopped is not None and self.checkpointer.failure is not None

    def close(self, *, keep_pool: bool = False) -> None:
        """Leave the weight-sync group and end the pool (unless kept); bounded, and safe after a failure.

        Every part is closed even if an earlier one fails; then the failure is raised.
        """
        with ExitStack() as parts:  # closes in the reverse order
            parts.callback(self.recorder.close)
            parts.callback(self.pool.close, keep_pool=keep_pool)
            parts.callback(self.sender.close)
            parts.callback(self.batches.close)
