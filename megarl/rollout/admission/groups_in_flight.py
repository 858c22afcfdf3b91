"""Prompt groups by state: in flight, ready for a step, and trained but reusable. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass


class ReadyGroups:
    """The finished groups that no step has taken, oldest token first; within a version in the order of finishing."""

    def __init__(self, *, by_id: bool = False) -> None:
        """`by_id`: order the groups of one version by id instead."""
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
        """Yield (version, groups) for the `number` groups that a step takes next, or for all if there are fewer."""
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
        """Return how many groups of each version would remain if a step took `number` groups now."""
        left = Counter({version: len(groups) for version, groups in self._by_version.items()})
        return left - Counter({version: len(groups) for version, groups in self.first(number)})


class GroupsInFlight:
    """The groups that have started and not finished, by the version at which they started.

    A token's version must be published and not older than the group's start, or be one of those that the group had
    when it was restarted.
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
        """Record that engines are about to serve `version`, so that tokens may carry it."""
        self._published.add(version)

    def serve(self, version: int) -> None:
        """Record that the engines serve `version`."""
        # No group in flight can have a token older than its start.
        oldest = min(self._starts.values(), default=version)
        self._published = {each for each in self._published if each >= oldest} | {version}

    def start(self, groups: Iterable[int], version: int) -> None:
        """Record that groups start, while the engines serve `version`."""
        started = dict.fromkeys(groups, version)
        self._starts |= started
        if started:  # an entry of zero groups would stay forever
            self._by_start[version] += len(started)

    def start_again(self, group: int, versions: Set[int]) -> None:
        """Record that a group restarts with tokens of `versions`; its start version is the oldest of them."""
        self.start([group], min(versions))
        self._kept[group] = frozenset(versions)

    def leave(self, group: int, versions: Iterable[int]) -> int:
        """Remove a group with tokens of `versions`; return the oldest of these, or its start version without tokens.

        Raises ValueError if the group is not in flight, or if a token has an impossible version.
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
    """The trained groups that wait in the queue for another use; each was used less than `max_uses` times."""

    def __init__(self, max_uses: int) -> None:
        if max_uses < 1:
            raise ValueError(f"a group is used at least once, so max_uses must be >= 1, got {max_uses}")
        self.max_uses = max_uses
        self._groups: dict[int, ReplayUse] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def keep(self, group: int, use: ReplayUse) -> bool:
        """Keep a group for another use; return False if it has none left."""
        if use.uses >= self.max_uses:
            return False
        self._groups[group] = use
        return True

    def take(self, number: int) -> dict[int, ReplayUse]:
        """Remove and return the next `number` groups to use.

        Those with the fewest uses come first, then those that become too old soonest, then by id.
        """
        groups = self._groups
        first = sorted(groups, key=lambda group: (groups[group].uses, groups[group].oldest, group))[:number]
        return {group: groups.pop(group) for group in first}

    def drop(self, usable: Callable[[int], bool]) -> list[int]:
        """Remove and return the groups that can no longer be used.

        `usable` says whether the next step may train a group, given the version of its oldest token.
        """
        dropped = [group for group, use in self._groups.items() if not usable(use.oldest)]
        for group in dropped:
            del self._groups[group]
        return dropped
