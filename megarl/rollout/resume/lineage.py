"""The lineage of a history of weights: which restart epochs made its updates. Pure.

A run that resumes at some version makes different updates from there on; this begins a restart epoch. A history is
therefore a path in a tree of weights. The distance between two weights is the number of updates on the path between
them: if `lost` updates of the first were discarded, the path leads back over these and then forward to the second.
This distance defines `VersionSpan.counts_as`.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megarl.queue.trajectory import VersionSpan


@dataclass(frozen=True)
class Epoch:
    """The updates from version `first` to the beginning of the lineage's next epoch.

    `number` counts the epochs of a run; `name` is unique over all runs.
    """

    number: int
    name: str
    first: int


Lineage = tuple[Epoch, ...]

# The weights that a run without a checkpoint starts from.
INITIAL: Lineage = (Epoch(-1, "initial", 0),)


def next_epoch(resumed: Lineage, version: int, known: Lineage = ()) -> Lineage:
    """Return the lineage of a run that resumes at `version` of `resumed`. `known`: another lineage of the same run."""
    number = 1 + max((epoch.number for epoch in (*resumed, *known)), default=-1)
    return (*resumed, Epoch(number, uuid.uuid4().hex, version))


def common_version(other: Lineage, resumed: Lineage, version: int) -> int | None:
    """Return the last version that a history of lineage `other` shares with `resumed`, which ends at `version`.

    None if they share none.
    """
    shared = 0
    while shared < min(len(other), len(resumed)) and other[shared] == resumed[shared]:
        shared += 1
    if not shared:
        return None
    return min([version, *(epoch.first for lineage in (other, resumed) for epoch in lineage[shared : shared + 1])])


def recount(spans: Iterable[VersionSpan], common: int, lineage: Lineage) -> tuple[VersionSpan, ...]:
    """Return the spans, recorded in `lineage`, as they count in a history that shares versions up to `common`."""
    return tuple(_recount(span, common, lineage) for span in spans)


def _recount(span: VersionSpan, common: int, lineage: Lineage) -> VersionSpan:
    lost = max(span.lost, span.version - common)
    if lost == span.lost:
        return span
    return replace(span, lost=lost, epoch=span.epoch if span.lost else _maker(lineage, span.version))


def _maker(lineage: Sequence[Epoch], version: int) -> int:
    """Return the number of the epoch that made the last update of `version`."""
    return next((epoch.number for epoch in reversed(lineage) if epoch.first < version), lineage[0].number)


def lineage_content(lineage: Lineage) -> list[list[object]]:
    """Return a lineage as JSON content."""
    return [[epoch.number, epoch.name, epoch.first] for epoch in lineage]


def read_lineage(content: Iterable[Sequence[object]]) -> Lineage:
    """Return the lineage of `lineage_content`."""
    return tuple(Epoch(int(str(number)), str(name), int(str(first))) for number, name, first in content)
