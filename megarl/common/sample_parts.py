"""The rows of a sample. An agent may make several of one sample, its parts, which share one reward. Pure.

Part 0 stands for the sample wherever samples are counted. In every list of rows or tags the parts of a sample follow
each other in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class SamplePart(Protocol):
    """A row, or the tag of one."""

    @property
    def part(self) -> int:
        """The number of the row among those of its sample, from 0."""
        ...


P = TypeVar("P", bound=SamplePart)


def first_parts(rows: Iterable[P]) -> list[P]:
    """Return one row of each sample, in order."""
    return [row for row in rows if row.part == 0]


def by_sample(rows: Iterable[P]) -> list[list[P]]:
    """Return the rows of each sample, in order. Raises ValueError if a sample does not begin with its part 0."""
    samples: list[list[P]] = []
    for row in rows:
        if row.part == 0:
            samples.append([row])
        elif samples and row.part == len(samples[-1]):
            samples[-1].append(row)
        else:
            raise ValueError(f"part {row.part} of a sample does not follow the part before it")
    return samples
