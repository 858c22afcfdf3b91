"""The prompt groups in flight, and the possible versions of their tokens. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

# The finished prompt groups that no step has taken, and which come next. Pure.


class ReadyGroups:
    """Groups by the version of their oldest token, those of one version in the order in which they finished.

    A step takes those with the oldest tokens first.
    """

    def __init__(self, *, by_id: bool = False) -> None:
        """`by_id`: those of one version are in the order of their ids instead."""
        self._by_id = by_id
        self._by_version: dict[int, dict[int, bool]] = {}  # version of the oldest token -> group -> ok

    def __len__(self) -> int:
        return sum(map(len, self._by_version.values()))

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self._by_version.values())

    def add(self, group: int, ok: bool, oldest: int) -> None:
        """Add a group that has finished. `ok` is False if it cannot be trained on."""
        self._by_version.setdefault(oldest, {})[group] = ok

    @property
    def any_ok(self) -> bool:
        """True if at least one group can be trained on."""
        return any(ok for groups in self._by_version.values() for ok in groups.values())

    def first(self, number: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (version, groups) of the `number` groups that a step takes next, or of all if there are fewer."""
        for version in sorted(self._by_version):
            finished = self._by_version[version]
            groups = list(itertools.islice(sorted(finished) if self._by_id else finished, number))
            yield version, groups
            number -= len(groups)
            if not number:
                return

    def take(self, number: int) -> tuple[dict[int, bool], dict[int, int]]:
        """Remove these groups; return whether each can be trained on, and the version of its oldest token."""
        taken: dict[int, bool] = {}
        oldest: dict[int, int] = {}
        for version, groups in self.first(number):
            left = self._by_version[version]
            taken |= {group: left.pop(group) for group in groups}
            oldest |= dict.fromkeys(groups, version)
            if not left:
                del self._by_version[version]
        return taken, oldest

    def left_after(self, number: int) -> Counter[int]:
        """Return the numbers of groups by version that would remain if a step took `number` groups now."""
        left = Counter({version: len(groups) for version, groups in self._by_version.items()})
        return left - Counter({version: len(groups) for version, groups in self.first(number)})


class GroupsInFlight:
    """The groups that have started and not finished, by the version at which they started.

    A token of a group has a version that engines were given and that is not older than the group's start, or one that
    the group had when it was started again.
    """

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}  # group -> version at which it was started
        self._by_start: Counter[int] = Counter()  # numbers of groups by that version
        self._kept: dict[int, frozenset[int]] = {}  # versions of the tokens with which a group started again
        self._published: set[int] = set()  # versions that the engines serve, have served or are about to serve

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[int]:
        return iter(self._starts)

    def announce(self, version: int) -> None:
        """Record that engines are about to serve `version`, which tokens may carry from now on."""
        self._published.add(version)

    def serve(self, version: int) -> None:
        """Record that the engines serve `version`."""
        # No group in flight can have a token of an earlier version than the one at which it was started.
        oldest = min(self._starts.values(), default=version)
        self._published = {each for each in self._published if each >= oldest} | {version}

    def start(self, groups: Iterable[int], version: int) -> None:
        """Record that groups start, while the engines serve `version`."""
        started = dict.fromkeys(groups, version)
        self._starts |= started
        if started:  # an entry of zero groups would stay forever
            self._by_start[version] += len(started)

    def start_again(self, group: int, versions: Set[int]) -> None:
        """Record that a group starts with tokens of `versions`, as if at the oldest of these."""
        self.start([group], min(versions))
        self._kept[group] = frozenset(versions)

    def leave(self, group: int, versions: Iterable[int]) -> int:
        """Remove a group with tokens of `versions`; return that of the oldest one, or of its start if there is none.

        Raises ValueError if the group is not in flight, or if a token has a version that cannot be right.
        """
        if group not in self._starts:
            raise ValueError(f"group {group} is not in flight")
        started = self._starts[group]
        present = set(versions)
        oldest = min(present, default=started)
        if oldest < started:
            raise ValueError(f"group {group} was started at version {started} and has a token of version {oldest}")
        if unknown := present - self._published - self._kept.get(group, frozenset()):
            raise ValueError(
                f"group {group} has tokens of version {max(unknown)}, which was never published; the last is "
                f"{max(self._published)}"
            )
        del self._starts[group]
        self._kept.pop(group, None)
        self._by_start[started] -= 1
        if not self._by_start[started]:
            del self._by_start[started]
        return oldest

    @property
    def by_start(self) -> Counter[int]:
        """The numbers of groups by the version at which they started."""
        return self._by_start.copy()

    def started_by(self, version: int) -> list[int]:
        """Return the groups, sorted, that started at `version` or earlier."""
        return sorted(group for group, started in self._starts.items() if started <= version)


# The trained groups that may be trained again: which of them are used next, and which leave the queue. Pure.


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
    """The groups that wait in the queue for another use; none was used `max_uses` times."""

    def __init__(self, max_uses: int) -> None:
        if max_uses < 1:
            raise ValueError(f"a group is used at least once, so max_uses must be >= 1, got {max_uses}")
        self.max_uses = max_uses
        self._groups: dict[int, ReplayUse] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def keep(self, group: int, use: ReplayUse) -> bool:
        """Keep a group for another use; False, without keeping it, if it has no uses left."""
        if use.uses >= self.max_uses:
            return False
        self._groups[group] = use
        return True

    def take(self, number: int) -> dict[int, ReplayUse]:
        """Remove and return the next `number` groups to use.

        Those with the fewest uses come first, then those that become too old soonest, then by id.
        """
        first = sorted(self._groups, key=lambda group: self._order(group, self._groups[group]))[:number]
        return {group: self._groups.pop(group) for group in first}

    @staticmethod
    def _order(group: int, use: ReplayUse) -> tuple[int, int, int]:
        return use.uses, use.oldest, group

    def drop(self, usable: Callable[[int], bool]) -> list[int]:
        """Remove and return the groups that can no longer be used.

        `usable` says whether the next step may train a group, given the version of its oldest token.
        """
        dropped = [group for group, use in self._groups.items() if not usable(use.oldest)]
        for group in dropped:
            del self._groups[group]
        return dropped
