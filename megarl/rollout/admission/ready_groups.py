"""The finished prompt groups that no step has taken, and which of them come next. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator


class ReadyGroups:
    """Groups by the version of their oldest token, those of one version in the order in which they finished.

    A step takes those with the oldest tokens first.
    """

    def __init__(self) -> None:
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
            groups = list(itertools.islice(self._by_version[version], number))
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
        """Return the numbers of groups by version that would be left if a step took `number` groups now."""
        left = Counter({version: len(groups) for version, groups in self._by_version.items()})
        return left - Counter({version: len(groups) for version, groups in self.first(number)})
