"""Places spans on lines such that on each of them spans are nested or follow each other, as a trace viewer needs. Pure.

All times are whole microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

ROUNDING_US = 5  # by which a span may end after the one that it is in, for example because both were rounded


@dataclass(frozen=True)
class Placed(Generic[T]):
    """A span on a line: its number, from 0, and the span's beginning and end, which may be cut to fit."""

    line: int
    begin: int
    end: int
    item: T


@dataclass
class _Line:
    """The ends of the spans that are open on one line, the innermost last."""

    open: list[int] = field(default_factory=list)

    def take(self, begin: int, end: int) -> int | None:
        """Place a span, which begins no earlier than those before; return its end, or None if it does not fit."""
        while self.open and self.open[-1] <= begin:
            self.open.pop()
        if self.open and end > self.open[-1] + ROUNDING_US:
            return None
        end = min(end, self.open[-1]) if self.open else end
        self.open.append(end)
        return end


def nest(spans: Iterable[tuple[int, int, T]], first_line: int = 0) -> list[Placed[T]]:
    """Place spans (begin, end, item), each on the first line from `first_line` on where it nests, in order of time."""
    lines: list[_Line] = []
    placed = []
    for begin, end, item in sorted(spans, key=lambda span: (span[0], -span[1])):
        fits = ((number, fit) for number, line in enumerate(lines) if (fit := line.take(begin, end)) is not None)
        number, fit = next(fits, (len(lines), end))
        if number == len(lines):
            lines.append(_Line([end]))
        placed.append(Placed(first_line + number, begin, fit, item))
    return placed


def share_lines(spans: Sequence[tuple[int, int, Hashable, T]]) -> list[Placed[T]]:
    """Place spans (begin, end, unit, item) such that those of a unit are on one line, as long as they nest there.

    Units that overlap are on different lines, of which as few are used as possible.
    """
    units: dict[Hashable, list[tuple[int, int, T]]] = {}
    for begin, end, unit, item in spans:
        units.setdefault(unit, []).append((begin, end, item))
    inside = [nest(each) for each in units.values()]
    free: list[int] = []  # lines, the lowest first
    busy: list[tuple[int, int]] = []  # (end, line)
    count = 0
    result = []
    for members in sorted(inside, key=lambda each: each[0].begin):
        begin, end = members[0].begin, max(each.end for each in members)
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lines = []
        for _ in range(1 + max(each.line for each in members)):
            if not free:
                heapq.heappush(free, count)
                count += 1
            lines.append(heapq.heappop(free))
        for line in lines:
            heapq.heappush(busy, (end, line))
        result += [Placed(lines[each.line], each.begin, each.end, each.item) for each in members]
    return result
