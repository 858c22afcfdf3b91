"""The replicas that belong to the pool: which take part in publications, which are drained, which come and go. Pure.

A new replica has no weights: it joins with the next publication. The members of a publication stay the same from its
beginning to its end, so a replica that is removed meanwhile ends after it. An index is never used again.
"""

from __future__ import annotations

from collections.abc import Iterable


class Membership:
    """Keeps the indices of all replicas, from the start of their engines to the end of them."""

    def __init__(self, replicas: Iterable[int]) -> None:
        """`replicas`: those of the start; all take part in the first publication."""
        self._all = set(replicas)
        self._next = max(self._all, default=-1) + 1
        self._published_to: set[int] | None = None  # the members of the publication that is being made
        self.starting: set[int] = set()  # added ones whose engines are not up yet
        self.unplaced: set[int] = set()  # those of them that may not have taken their place yet
        self.new: set[int] = set()  # those that serve after the next publication that includes them
        self.drained: set[int] = set()
        self.leaving: set[int] = set()  # removed ones whose engines have not ended
        self.missing = 0  # were lost with their node and found no other place

    def leave_out(self, used: Iterable[int]) -> None:
        """Give none of these indices to a new replica: engines that have ended had them."""
        self._next = max([self._next, *(index + 1 for index in used)])

    @property
    def all(self) -> set[int]:
        """All replicas whose engine is up or was up: lost, new, drained and leaving ones included."""
        return set(self._all)

    @property
    def members(self) -> list[int]:
        """The replicas that take part in the publication that is being made, or else in the next one, sorted."""
        return sorted(self._all - self.leaving if self._published_to is None else self._published_to)

    @property
    def idle(self) -> set[int]:
        """Those that hold their devices and serve nothing."""
        return (self.starting | self.new | self.drained) - self.leaving

    def reserve(self, count: int) -> list[int]:
        """Return the indices of `count` new replicas, whose engines are now started."""
        indices = list(range(self._next, self._next + count))
        self._next += count
        self.starting |= set(indices)
        self.unplaced |= set(indices)
        return indices

    def placed(self, index: int) -> None:
        """Record that a new replica has taken its place, which is therefore not free any more."""
        self.unplaced.discard(index)

    def started(self, index: int) -> None:
        """Record that the engine of a new replica is up."""
        self.starting.remove(index)
        self.placed(index)
        self._all.add(index)
        self.new.add(index)

    def not_started(self, index: int) -> None:
        """Record that the engine of a new replica did not come up."""
        self.starting.remove(index)
        self.unplaced.discard(index)

    def needed(self, index: int) -> bool:
        """Tell whether the publication that is being made needs the engine of a replica."""
        return self._published_to is not None and index in self._published_to

    def excuse(self, index: int) -> None:
        """Record that the publication that is being made goes on without a replica."""
        if self._published_to is not None:
            self._published_to.discard(index)

    def forget(self, index: int) -> None:
        """Record that the engine of a replica has ended for good."""
        for indices in (self._all, self.new, self.drained, self.leaving, self._published_to or set()):
            indices.discard(index)

    def begin_sync(self) -> list[int]:
        """Record that a publication begins, or begins again; return the new replicas that join with it, sorted."""
        self._published_to = None
        self._published_to = set(self.members)
        joining = sorted(self.new & self._published_to)
        self.new.difference_update(joining)
        return joining

    def end_sync(self) -> None:
        """Record that no publication is being made."""
        self._published_to = None
