"""The replicas that keep their weights for an evaluation, and the requests that each replica gets meanwhile. Pure.

A pinned replica is left out of publications and works for the evaluation only. When the evaluation is over, it trains
again: at once if it has missed no version, else after the next publication.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pins:
    """The pinned replicas, from the start of an evaluation to the publication after its end."""

    def __init__(self) -> None:
        self.pinned: frozenset[int] = frozenset()
        self._outdated: set[int] = set()  # they have missed a version
        self._left_out: frozenset[int] = frozenset()  # of the publication that is being made

    @property
    def reserved(self) -> frozenset[int]:
        """The replicas that get no training requests."""
        return self.pinned | self._outdated

    def pin(self, serving: Iterable[int], count: int) -> frozenset[int]:
        """Pin `count` of the replicas that serve with the current weights; return them.

        At least one is left for training, so there may be fewer, or none. Raises ValueError if some are pinned already.
        """
        if self.pinned:
            raise ValueError(f"replicas {sorted(self.pinned)} are pinned for another evaluation")
        free = sorted(set(serving) - self.reserved)
        self.pinned = frozenset(free[max(1, len(free) - count) :])
        return self.pinned

    def release(self) -> None:
        """Record that the evaluation is over."""
        self.pinned = frozenset()

    def leave_out(self) -> frozenset[int]:
        """Return the replicas that the publication which now begins leaves out."""
        self._left_out = self.pinned
        self._outdated |= self.pinned  # even if the evaluation ends before the publication does
        return self._left_out

    def published(self) -> None:
        """Record that a version was published, to all replicas but those that `leave_out` has returned."""
        self._outdated = set(self._left_out)
        self._left_out = frozenset()

    def forget(self, replica: int) -> None:
        """Record that a replica is lost or replaced: it has nothing to keep."""
        self.pinned -= {replica}
        self._left_out -= {replica}
        self._outdated.discard(replica)

    def closed_to(self, replicas: Iterable[int], *, background: bool) -> set[int]:
        """Return those of `replicas` that a request must not go to. `background`: it belongs to the evaluation.

        An evaluation whose pinned replicas are all lost goes on with the others.
        """
        if not self.pinned and not self._outdated:  # as between evaluations, where every request asks
            return set()
        return set(replicas) - self.pinned if background and self.pinned else set(self.reserved)
