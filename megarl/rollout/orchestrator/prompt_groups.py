"""The prompt groups of a run, from their start to the queue.

An admitted group runs, here or in a worker, and ends in one of three ways: its rows go into the queue, usable or not;
it has no signal and gives its place to another group; or its failure ends the run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megarl.algorithms.filters import without_signal
from megarl.common.errors import NoReplicaLeft, NoWorkerLeft, RolloutError, clear_text
from megarl.common.values import by_sample, first_parts
from megarl.config.derived.algorithm import shaping_of
from megarl.config.derived.datasets import response_limits
from megarl.config.derived.staleness import pace_of, refill_groups
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.queue.transfer import QueueWriter, image_key
from megarl.rewards.worker_pool import RewardPoolError
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.admission_log import SCHEDULE_FILE, ScheduleFile
from megarl.rollout.agents.loop_host import failed_group
from megarl.rollout.agents.loop_run import LoopRun, RunningGroups
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.resume.group_progress import UnfinishedGroup
from megarl.rollout.resume.journal import RolloutJournal
from megarl.rollout.resume.kept_groups import History, JournaledGroup
from megarl.rollout.tasks.prompts import PromptSource
from megarl.rollout.transport.background import BackgroundTasks
from megarl.telemetry.trace import events


def ok_rewards(rows: Sequence[Trajectory]) -> list[float]:
    """Return the rewards of a group's usable samples."""
    return [row.reward for row in first_parts(rows) if row.status == "ok"]


def is_demonstrated(rows: Sequence[Trajectory]) -> bool:
    """Return whether a group's samples are demonstrations, which have no rewards."""
    return any(row.demonstrated for row in rows)


def usable_samples(statuses: Iterable[str]) -> bool:
    """Return whether a group can be trained on: an advantage compares samples, so two must be ok."""
    return sum(status == "ok" for status in statuses) >= 2


OnGroupFailure = Literal["count", "stop"]


class FailurePolicy:
    """Decides whether a failed group ends the run or is counted. Report every failure and every success to it.

    A failure ends the run if the policy is `stop`; if no replica, agent worker or reward process is left; or if `limit`
    groups in a row have failed: then the cause is not in one group.
    """

    def __init__(self, on_group_failure: OnGroupFailure, limit: int) -> None:
        """`on_group_failure`: `rollout.on_group_failure` of the config. A `limit` below 2 counts as 2."""
        self._on_group_failure, self._limit = on_group_failure, max(2, limit)
        self._in_a_row = 0

    def succeeded(self) -> None:
        """Record that a group has been sampled and scored."""
        self._in_a_row = 0

    def decide(self, group_id: int, error: Exception) -> RolloutError | None:
        """Return the error that ends the run; None if the group is to be counted as failed."""
        self._in_a_row += 1
        if isinstance(error, NoReplicaLeft | NoWorkerLeft | RewardPoolError) or self._on_group_failure == "stop":
            return error if isinstance(error, RolloutError) else RolloutError(f"rollout failed: {clear_text(error)}")
        if self._in_a_row >= self._limit:
            return RolloutError(
                f"{self._in_a_row} prompt groups in a row failed in rollout; the last, group {group_id}: "
                f"{clear_text(error)}"
            )
        return None


logger = logging.getLogger(__name__)

DECODED_AT_ONCE = 4  # kept groups; their trajectories may be large


class PromptGroups:
    """Starts the groups that admission allows and brings each to its end, in background tasks of the controller.

    `admission`: of the current history; `begin` replaces it. `queued`: the keys of each group's rows in the queue, by
    sample and part.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        source: PromptSource,
        fleet: EnginePool,
        run_loops: Callable[[LoopRun], Awaitable[list[Trajectory]]],
        running: RunningGroups,
        writer: QueueWriter,
        journal: RolloutJournal,
        tasks: BackgroundTasks,
    ) -> None:
        """`tasks`: a group's task fails if the group's failure ends the run.

        `run_loops`: runs the loops of a group, here or in a worker. `running`: the groups with running loops.
        """
        self._config = config
        self._source, self._fleet, self._run_loops, self._running = source, fleet, run_loops, running
        self._writer, self._journal, self._tasks = writer, journal, tasks
        self._schedule = ScheduleFile(run_dir / SCHEDULE_FILE)
        self._shaping = shaping_of(config)
        self._failures = self._failure_policy()
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._putting = 0  # groups being written to the queue
        self.queued: dict[int, list[str]] = {}
        self._files: dict[int, list[str]] = {}  # keys of the rows that hold image files
        self.admission = self._new_admission()

    def begin(self, state: dict[str, Any] | None) -> None:
        """Go back to a committed history of admission (None: an empty one), with no group in flight."""
        attempts = max(self.admission.attempts, self._journal.started())
        self._schedule.close()  # a trainer that begins a new history has moved it aside
        self._failures, self.admission = self._failure_policy(), self._new_admission()
        self.queued.clear()
        self._files.clear()
        self.admission.load_state_dict(state or self.admission.state_dict(), attempts)

    def _new_admission(self) -> Admission:
        config = self._config
        recorded: dict[str, Any] = {"record": self._schedule.write} if config.telemetry.dump_batches else {}
        return Admission(
            config.batch.groups,
            pace_of(config),
            refill=refill_groups(config),
            steps=config.run.steps,
            max_uses=config.admission.max_uses,
            **recorded,
        )

    def _failure_policy(self) -> FailurePolicy:
        return FailurePolicy(self._config.rollout.on_group_failure, self._config.batch.groups)

    async def use_again(self, version: int) -> None:
        """Continue the groups that had tokens before the resume, as far as the bound allows.

        Finished ones need no engine; the others continue from their tokens, as after the loss of an engine.
        """
        admission = self.admission
        found = await self._journal.candidates(version, self._source)
        self.check_present(admission, f"the use of kept groups from version {version} on")
        used = [found.groups[group] for group in admission.keep(found.versions())]
        await self._journal.begin_epoch(version, used)
        self.check_present(admission, f"the use of kept groups from version {version} on")
        for each in used:
            self._running.stats.kept += 1
            if each.finished:
                self._tasks.start(self._settle_kept(each))
            else:
                self._tasks.start(self._run(each.group, each.begun()))
        if self._journal.every_s:
            self._tasks.start(self._journal.keep_up(self.history, self._running.progress))

    async def _settle_kept(self, kept: JournaledGroup) -> None:
        """Settle a group that finished before the resume. Only a few are decoded at a time: they may be large."""
        async with self._decoding:
            rows = await asyncio.to_thread(kept.rows)
            await self._settle(kept.group, rows)

    def check_present(self, admission: Admission, what: str) -> None:
        """Raise RolloutError if another trainer has begun since `admission` was current."""
        if self.admission is not admission:
            raise RolloutError(f"{what} was given up: another trainer has begun meanwhile")

    def history(self) -> History:
        """Return the settled groups."""
        return History.of(self.admission.state_dict())

    def start(self) -> None:
        """Start every group that admission allows; remove reusable groups from the queue that it no longer needs."""
        groups = self.admission.admit()
        if groups:
            self._journal.count(self.admission.attempts)
        for group_id in groups:
            self._tasks.start(self._run(group_id))
        self.free_rows()

    def free_rows(self) -> None:
        """Remove the rows that no step needs from the queue, in the background."""
        # Groups of a batch from an earlier controller have no rows.
        released = self.admission.take_released()
        if keys := [key for group in released for of in (self.queued, self._files) for key in of.pop(group, [])]:
            self._tasks.start(self._writer.clear(keys))

    async def _run(self, group_id: int, begun: UnfinishedGroup | None = None) -> None:
        """Run one prompt group to its end; `begun`: the state of an earlier attempt, which it continues.

        Raises RolloutError if its failure ends the run.
        """
        try:
            await self._fleet.may_begin()  # the group's deadline counts from here
            rows = await self._running.run(group_id, begun, self._run_loops)
        except Exception as error:
            logger.warning("group %d failed", group_id, exc_info=error)
            if (failure := self._failures.decide(group_id, error)) is not None:
                raise failure from error
            reason = str(error) or type(error).__name__
            events.fault("group", f"group {group_id} failed: {reason}")
            samples, dataset = self._config.batch.samples_per_group, self._source.dataset(group_id)
            rows = failed_group(group_id, samples, dataset, reason)
        else:
            self._judge(group_id, rows)
            if not is_demonstrated(rows):  # the data file has those, and no engine has worked for them
                self._journal.note(rows, self._source.draw(group_id))
        await self._settle(group_id, rows)

    def _judge(self, group_id: int, rows: Sequence[Trajectory]) -> None:
        """Report a group's end to the failure policy; a group without usable samples has failed too.

        Non-finite log-probs are left to the trainer, which keeps the batch and bounds the number of such steps. Raises
        RolloutError if a failure ends the run.
        """
        if usable_samples(row.status for row in first_parts(rows)):
            self._failures.succeeded()
            return
        self._running.stats.failed_lengths += [sum(len(row.response_ids) for row in parts) for parts in by_sample(rows)]
        failures = [row.failure for row in first_parts(rows) if row.status != "ok"]
        reason = f"{len(failures)} of {len(first_parts(rows))} samples cannot be used; the first: {failures[0]}"
        if any(row.tag.bad_logprobs for row in rows):
            logger.warning("group %d failed, and the trainer decides what follows: %s", group_id, reason)
            return
        if (end := self._failures.decide(group_id, RolloutError(reason))) is not None:
            raise end

    async def _settle(self, group_id: int, rows: Sequence[Trajectory]) -> None:
        """Queue a finished group, or replace it by another one if it has no signal."""
        files: dict[str, bytes] = {}
        try:
            if any(row.images for row in rows):  # `finish` below forgets the problem
                async with asyncio.timeout(self._config.timeouts.rpc_s):
                    files = await asyncio.to_thread(self._source.draw(group_id).files)
                files |= {name: content for row in rows for name, content in row.files.items()}
        except (OSError, ValueError) as error:
            logger.warning("group %d failed: an image can no longer be read", group_id, exc_info=error)
            samples, dataset = self._config.batch.samples_per_group, self._source.dataset(group_id)
            rows = failed_group(group_id, samples, dataset, f"an image can no longer be read: {error}")
        self._source.finish(group_id, [] if is_demonstrated(rows) else ok_rewards(rows))
        versions = {span.counts_as for row in rows for span in row.versions}
        if self._replaces(group_id, rows, versions):
            self.start()
        else:
            await self._put(group_id, rows, files)
            self.admission.finish(group_id, usable_samples(row.status for row in first_parts(rows)), versions)
        self._tasks.changed.set()

    async def _put(self, group_id: int, rows: Sequence[Trajectory], files: Mapping[str, bytes]) -> None:
        """Write a finished group to the queue, at once if no other group is in flight."""
        self._putting += 1
        self.queued[group_id] = [row.key for row in rows]
        self._files[group_id] = [image_key(group_id, name) for name in files]
        try:
            await self._writer.put_group(rows, files, more=self._putting < len(self.admission.in_flight))
        finally:
            self._putting -= 1

    def _replaces(self, group_id: int, rows: Sequence[Trajectory], versions: Set[int]) -> bool:
        """Give the place of a group without signal to another one; return False if it must be queued."""
        if not self._config.admission.refill:
            return False
        tags = [row.tag for row in rows]
        limits = response_limits(self._config)
        shaping = replace(self._shaping, max_tokens=limits[tags[0].dataset]) if limits else self._shaping
        if any(tag.bad_logprobs for tag in tags) or not without_signal(tags, shaping):
            return False  # the trainer must see non-finite log-probs
        if not self.admission.replace(group_id, versions):
            return False
        self._running.stats.note_replaced(tags)
        return True
