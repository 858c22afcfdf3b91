"""Numbers of prompt groups by what has become of them.

Invariant: at every moment
`admitted == in_flight + replaced + ready + taken + trained + filtered + dropped_stale + failed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.rollout.admission.reusable_groups import Use


@dataclass(frozen=True)
class Counters:
    """Numbers of prompt groups since the start of the committed history."""

    admitted: int = 0
    in_flight: int = 0
    replaced: int = 0  # finished without signal since the last step was taken
    ready: int = 0  # in the queue, not yet taken
    taken: int = 0  # by a step that is not committed, the groups replaced before it included
    trained: int = 0
    filtered: int = 0
    dropped_stale: int = 0
    failed: int = 0
    rolled_back: int = 0  # attempts that a resume has discarded; not part of the history
    reusable: int = 0  # of the trained ones, those that still are in the queue because a step may train them again
    reused: int = 0  # uses of trained groups after their first one, in committed steps; these settle nothing

    @property
    def settled(self) -> int:
        """Groups whose end is committed."""
        return self.trained + self.filtered + self.dropped_stale + self.failed

    @property
    def balanced(self) -> bool:
        """True if the invariant of the module's docstring holds."""
        return self.admitted == self.in_flight + self.replaced + self.ready + self.taken + self.settled


@dataclass(frozen=True)
class Taken:
    """The groups that a step has taken, each list sorted."""

    ok: list[int]
    failed: list[int]
    replaced: list[int]  # before the step was taken, since the step before it was
    oldest: Mapping[int, int] = field(default_factory=dict)  # version of the oldest token of each new group
    reused: Mapping[int, Use] = field(default_factory=dict)  # trained before, and now again

    @property
    def total(self) -> int:
        """The number of groups that the commit of the step settles."""
        return len(self.ok) + len(self.failed) + len(self.replaced)
