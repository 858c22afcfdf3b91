"""The groups of a run that are being made: what each has so far, and what was measured of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping

from megarl.rollout.agents.batch_stats import BatchStats
from megarl.rollout.resume.group_progress import GroupProgress

Persist = Callable[[int, Mapping[int, GroupProgress]], Awaitable[None]]


async def _not_persisted(group_id: int, progress: Mapping[int, GroupProgress]) -> None:
    """There is no journal, so no run could continue the group."""


class RunningGroups:
    """`progress`: of the groups that run, by group. `stats`: the measurements since the last batch was taken."""

    def __init__(self, persist: Persist = _not_persisted) -> None:
        """`persist`: returns when what a group has is where a resumed run finds it; default: nothing resumes."""
        self.progress: dict[int, GroupProgress] = {}
        self.stats = BatchStats()
        self._persist = persist

    @contextlib.contextmanager
    def running(self, group_id: int, progress: GroupProgress) -> Iterator[None]:
        """Hold the progress of a group while it runs; measure the lengths of one that fails."""
        self.progress[group_id] = progress
        try:
            yield
        except Exception:
            self.stats.failed_lengths += progress.lengths()
            raise
        finally:
            self.progress.pop(group_id)

    async def persist(self, group_id: int) -> None:
        """Return when what the group has is kept. Raises RolloutError if it cannot be written."""
        await self._persist(group_id, self.progress)

    def take_stats(self) -> BatchStats:
        """Return the measurements, and begin new ones."""
        stats, self.stats = self.stats, BatchStats()
        return stats
