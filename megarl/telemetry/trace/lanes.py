"""Places spans on lines so that the spans of a line are nested or follow each other, as trace viewers need.

All times are whole microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

ROUNDING_US = 5  # a span may end this much after its enclosing one, for example because of rounding


@dataclass(frozen=True)
class Placed(Generic[T]):
    """A span on line number `line` (from 0). `end` may be cut to fit."""

    line: int
    begin: int
    end: int
    item: T


def share_lines(spans: Sequence[tuple[int, int, Hashable, T]]) -> list[Placed[T]]:
    """Place spans (begin, end, unit, item); the spans of a unit share a line if they nest there.

    Overlapping units are on different lines; uses as few lines as possible.
    """
    last: dict[Hashable, int] = {}  # when a unit ends
    for _, end, unit, _ in spans:
        last[unit] = max(end, last.get(unit, end))
    free: list[int] = []  # lines, the lowest first
    busy: list[tuple[int, int]] = []  # (end, line)
    # The lines of each unit, each with the ends of its open spans, the innermost last.
    lines: dict[Hashable, list[tuple[int, list[int]]]] = {unit: [] for unit in last}
    placed = []
    for begin, end, unit, item in sorted(spans, key=lambda span: (span[0], -span[1])):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        fits = ((line, fit) for line, open_ in lines[unit] if (fit := _take(open_, begin, end)) is not None)
        if (found := next(fits, None)) is None:
            line = heapq.heappop(free) if free else len(free) + len(busy)
            heapq.heappush(busy, (last[unit], line))
            lines[unit].append((line, [end]))
            found = line, end
        placed.append(Placed(found[0], begin, found[1], item))
    return placed


def _take(open_: list[int], begin: int, end: int) -> int | None:
    """Add a span to a line if it fits, and return its end. `open_`: the ends of the line's earlier spans."""
    while open_ and open_[-1] <= begin:
        open_.pop()
    if open_ and end > open_[-1] + ROUNDING_US:
        return None
    open_.append(min(end, open_[-1]) if open_ else end)
    return open_[-1]
