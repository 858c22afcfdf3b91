"""The trained groups that may be trained again: which of them are used next, and which leave the queue. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplayUse:
    """A trained group. `oldest`: the version of its oldest token; `uses`: the number of steps that have trained it."""

    oldest: int
    uses: int = 1

    @property
    def again(self) -> ReplayUse:
        """The same group after one more step has trained it."""
        return ReplayUse(self.oldest, self.uses + 1)


class ReusableGroups:
    """The groups that wait in the queue for a further use; none of them has been used `max_uses` times."""

    def __init__(self, max_uses: int) -> None:
        if max_uses < 1:
            raise ValueError(f"a group is used at least once, so max_uses must be >= 1, got {max_uses}")
        self.max_uses = max_uses
        self._groups: dict[int, ReplayUse] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def keep(self, group: int, use: ReplayUse) -> bool:
        """Let a group be used again; False, and it is not kept, if it has been used as often as it may."""
        if use.uses >= self.max_uses:
            return False
        self._groups[group] = use
        return True

    def take(self, number: int) -> dict[int, ReplayUse]:
        """Remove and return the `number` groups that are used next.

        Those with the fewest uses come first, then those that become too old soonest, then by id.
        """
        first = sorted(self._groups, key=lambda group: self._order(group, self._groups[group]))[:number]
        return {group: self._groups.pop(group) for group in first}

    @staticmethod
    def _order(group: int, use: ReplayUse) -> tuple[int, int, int]:
        return use.uses, use.oldest, group

    def drop(self, usable: Callable[[int], bool]) -> list[int]:
        """Remove and return the groups that cannot be used any more.

        `usable` tells for the version of a group's oldest token whether the next step may train it.
        """
        dropped = [group for group, use in self._groups.items() if not usable(use.oldest)]
        for group in dropped:
            del self._groups[group]
        return dropped
