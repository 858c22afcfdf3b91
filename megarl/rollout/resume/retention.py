"""The finished groups that the journal must keep, because a run that resumes could use them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.derived.staleness import Pace

# A checkpoint is asked for while at most one other is still being written.
_IN_PROGRESS = 2


@dataclass(frozen=True)
class History:
    """The groups that a history has settled: those below `next_group` that are not `unsettled`."""

    version: int
    next_group: int
    unsettled: frozenset[int]

    @classmethod
    def of(cls, admission: Mapping[str, Any]) -> History:
        """Return the history of an admission's `state_dict`."""
        return cls(int(admission["version"]), int(admission["next_group"]), frozenset(admission["unsettled"]))

    def settled(self, group: int) -> bool:
        """Tell whether the end of a group is part of this history."""
        return group < self.next_group and group not in self.unsettled


class Retention:
    """The histories that a run could resume from: that of the newest complete checkpoint, and those being saved."""

    def __init__(self, pace: Pace, resumed: History) -> None:
        """`resumed`: the history with which this trainer began."""
        # The version of a checkpoint's weights is less than `sync_interval` above the published one.
        self._reach = pace.max_staleness + pace.sync_interval - 1
        self._complete = resumed
        self._saving: dict[int, History] = {}

    def saving(self, step: int, history: History) -> None:
        """Record that a checkpoint of the first `step` steps is about to be written."""
        self._saving[step] = history
        for old in sorted(self._saving)[:-_IN_PROGRESS]:
            del self._saving[old]

    def saved(self, step: int) -> bool:
        """Record that the checkpoint of `step` is complete; False if that was known."""
        if step not in self._saving:
            return False
        self._complete = self._saving[step]
        self._saving = {later: history for later, history in self._saving.items() if later > step}
        return True

    def keeps(self, group: int, newest: int, history: History) -> bool:
        """Tell whether a finished group can still be used. `newest`: the highest version of its tokens.

        `history`: what the run has settled so far. Its groups are used again only by a run that resumes from before.
        There, tokens of later versions count as older by the number of lost updates, and soon pass the bound on
        staleness. So the journal holds little more than the groups that are not settled, even if no checkpoint is ever
        written.
        """
        if not history.settled(group):
            return True
        return any(
            not earlier.settled(group) and newest <= earlier.version + self._reach
            for earlier in (self._complete, *self._saving.values())
        )
