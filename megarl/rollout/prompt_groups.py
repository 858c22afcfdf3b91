"""The prompt groups of a run, from their start to the queue.

A group that admission lets start is run by the group runner and ends in one of three ways: its rows are put into the
queue, usable or not; it has no signal and leaves its place to another group; or its failure ends the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.algorithms.filters import without_signal
from megarl.common.errors import RolloutError
from megarl.common.files import write_json
from megarl.config.datasets import response_limits
from megarl.config.pace import capacity_groups, pace_of, refill_groups
from megarl.config.schema import Config
from megarl.config.shaping import shaping_of
from megarl.queue.trajectory import Trajectory, sample_key
from megarl.queue.transfer import QueueWriter
from megarl.rollout.admission import Admission, usable_samples
from megarl.rollout.background import BackgroundTasks
from megarl.rollout.failure_policy import FailurePolicy
from megarl.rollout.fleet import Fleet
from megarl.rollout.group_progress import UnfinishedGroup
from megarl.rollout.group_runner import GroupRunner
from megarl.rollout.journal import RolloutJournal
from megarl.rollout.kept_groups import KeptGroup
from megarl.rollout.prompts import PromptSource
from megarl.rollout.retention import History
from megarl.rollout.schedule import SCHEDULE_FILE, RecordedAdmission, ScheduleFile

logger = logging.getLogger(__name__)

ATTEMPTS_FILE = "attempts.json"
DECODED_AT_ONCE = 4  # kept groups, whose trajectories may be large


class PromptGroups:
    """Starts the groups that admission allows and brings each to its end, in the background tasks of the controller.

    `admission` is that of the present history; `begin` replaces it.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        source: PromptSource,
        fleet: Fleet,
        runner: GroupRunner,
        writer: QueueWriter,
        journal: RolloutJournal,
        tasks: BackgroundTasks,
    ) -> None:
        """`tasks`: a failure of a group that ends the run is a failure of its task."""
        self._config, self._run_dir = config, run_dir
        self._source, self._fleet, self._runner = source, fleet, runner
        self._writer, self._journal, self._tasks = writer, journal, tasks
        self._schedule = ScheduleFile(run_dir / SCHEDULE_FILE)
        self._shaping = shaping_of(config)
        self._failures = self._failure_policy()
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._putting = 0  # groups that are being written to the queue
        self.admission = self._new_admission()
        runner.persist = partial(journal.persist, progress=runner.progress, source=source)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Go back to a committed history of admission (None: to its beginning), with no group in flight."""
        attempts = self.admission.attempts
        counted = self._run_dir / ATTEMPTS_FILE
        if counted.is_file():
            attempts = max(attempts, int(json.loads(counted.read_text())["attempts"]))
        self._schedule.close()  # a trainer that begins a new history has moved it aside
        self._failures, self.admission = self._failure_policy(), self._new_admission()
        self.admission.load_state_dict(state or self.admission.state_dict(), attempts)

    def _new_admission(self) -> Admission:
        config = self._config
        groups, pace, steps = config.batch.groups, pace_of(config), config.run.steps
        refill, capacity, uses = refill_groups(config), capacity_groups(config), config.admission.max_uses
        if config.telemetry.dump_batches:
            return RecordedAdmission(
                groups, pace, refill=refill, capacity=capacity, steps=steps, max_uses=uses, record=self._schedule.write
            )
        return Admission(groups, pace, refill=refill, capacity=capacity, steps=steps, max_uses=uses)

    def _failure_policy(self) -> FailurePolicy:
        return FailurePolicy(self._config.rollout.on_group_failure, self._config.batch.groups)

    async def use_again(self, version: int) -> None:
        """Start with the groups that had tokens before the resume and that the bound allows.

        Finished ones need no engine; the others go on from their tokens, as after the loss of an engine.
        """
        admission = self.admission
        found = await self._journal.candidates(version, self._source)
        self.check_present(admission, f"the use of kept groups from version {version} on")
        used = [found.groups[group] for group in admission.keep(found.versions())]
        await self._journal.begin_epoch(version, used)
        self.check_present(admission, f"the use of kept groups from version {version} on")
        for each in used:
            self._runner.stats.kept += 1
            if each.finished:
                self._tasks.start(self._settle_kept(each))
            else:
                self._tasks.start(self._run(each.group, each.begun()))
        if self._journal.every_s:
            self._tasks.start(self._journal.keep_up(self.history, self._runner.progress, self._source))

    async def _settle_kept(self, kept: KeptGroup) -> None:
        """Settle a finished group of before the resume. A few are decoded at a time: they may be large."""
        async with self._decoding:
            await self._settle(kept.group, await asyncio.to_thread(kept.rows))

    def check_present(self, admission: Admission, what: str) -> None:
        """Raise RolloutError if a trainer has begun since `admission` was the present one."""
        if self.admission is not admission:
            raise RolloutError(f"{what} was given up: another trainer has begun meanwhile")

    def history(self) -> History:
        """Return what is settled now."""
        return History.of(self.admission.state_dict())

    def start(self) -> None:
        """Start every group that admission allows now; groups that may be used again may have to leave the queue."""
        groups = self.admission.admit()
        if groups:
            # Written before any of them starts, so that a resume can count the groups that were started in vain.
            write_json(self._run_dir / ATTEMPTS_FILE, {"attempts": self.admission.attempts})
        for group_id in groups:
            self._tasks.start(self._run(group_id))
        self.free_rows()

    def free_rows(self) -> None:
        """Remove the rows that no step needs any more from the queue, in the background."""
        if released := self.admission.take_released():
            samples = range(self._config.batch.samples_per_group)
            self._tasks.start(self._writer.clear([sample_key(group, index) for group in released for index in samples]))

    async def _run(self, group_id: int, begun: UnfinishedGroup | None = None) -> None:
        """Run one prompt group to its end; `begun`: what it had in an attempt before, which is continued.

        Raises RolloutError if its failure ends the run.
        """
        try:
            await self._fleet.may_begin()  # the group's deadline counts from then
            rows = await self._runner.run(group_id, begun)
        except Exception as error:
            logger.warning("group %d failed", group_id, exc_info=error)
            if (end := self._failures.decide(group_id, error)) is not None:
                raise end from error
            rows = self._runner.failed(group_id, str(error) or type(error).__name__)
        else:
            self._judge(group_id, rows)
            self._journal.note(rows, self._source)
        await self._settle(group_id, rows)

    def _judge(self, group_id: int, rows: Sequence[Trajectory]) -> None:
        """Tell the failure policy how a group has ended; one whose samples cannot be used has failed too.

        Raises RolloutError if that ends the run.
        """
        if usable_samples(row.status for row in rows):
            self._failures.succeeded()
            return
        reasons = [row.failure for row in rows if row.status != "ok"]
        error = RolloutError(f"{len(reasons)} of {len(rows)} samples cannot be used; the first: {reasons[0]}")
        if (end := self._failures.decide(group_id, error)) is not None:
            raise end

    async def _settle(self, group_id: int, rows: Sequence[Trajectory]) -> None:
        """Queue a finished group, or replace it by another one if it has no signal."""
        self._source.finish(group_id, [row.reward for row in rows if row.status == "ok"])
        versions = {span.counts_as for row in rows for span in row.versions}
        if self._replaces(group_id, rows, versions):
            self.start()
        else:
            await self._put(rows)
            self.admission.finish(group_id, usable_samples(row.status for row in rows), versions)
        self._tasks.changed.set()

    async def _put(self, rows: Sequence[Trajectory]) -> None:
        """Write a finished group to the queue, at once if no other group is in flight."""
        self._putting += 1
        try:
            await self._writer.put_group(rows, more=self._putting < len(self.admission.in_flight))
        finally:
            self._putting -= 1

    def _replaces(self, group_id: int, rows: Sequence[Trajectory], versions: Set[int]) -> bool:
        """Give the place of a group to another one if nothing could be learnt from it; False if it must be queued."""
        if not self._config.admission.refill:
            return False
        limits = response_limits(self._config)
        shaping = replace(self._shaping, max_tokens=limits[rows[0].dataset]) if limits else self._shaping
        if not without_signal([row.tag for row in rows], shaping):
            return False
        if not self.admission.replace(group_id, versions):
            return False
        self._runner.stats.note_replaced(rows)
        return True
