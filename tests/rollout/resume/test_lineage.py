"""Lineages by example: what two histories share, and what tokens of lost updates count as."""

import pytest

from megarl.queue.trajectory import VersionSpan
from megarl.rollout.resume.lineage import (
    INITIAL,
    Lineage,
    common_version,
    lineage_content,
    next_epoch,
    read_lineage,
    recount,
)

FIRST = next_epoch(INITIAL, 0)
SECOND = next_epoch(FIRST, 4, FIRST)  # resumed at version 4
THIRD = next_epoch(SECOND, 6, SECOND)
BRANCH = next_epoch(FIRST, 2, THIRD)  # back to version 2, in which epochs 1 and 2 have no part


@pytest.mark.parametrize(
    ("other", "resumed", "version", "common"),
    [
        (FIRST, FIRST, 3, 3),
        (FIRST, SECOND, 9, 4),
        (SECOND, FIRST, 9, 4),  # a checkpoint of the first epoch that had been set aside
        (THIRD, FIRST, 3, 3),
        (THIRD, BRANCH, 9, 2),
        (BRANCH, THIRD, 9, 2),
        (THIRD, SECOND, 9, 6),
        (FIRST, INITIAL, 0, 0),
        (FIRST, next_epoch(INITIAL, 0), 8, 0),  # another run of the same model
        (FIRST, (), 3, None),
        ((), FIRST, 3, None),
    ],
)
def test_the_last_version_in_common(other: Lineage, resumed: Lineage, version: int, common: int | None) -> None:
    assert common_version(other, resumed, version) == common


def test_epochs_are_numbered_over_all_histories_of_a_run() -> None:
    assert [each[-1].number for each in (INITIAL, FIRST, SECOND, THIRD, BRANCH)] == [-1, 0, 1, 2, 3]
    assert read_lineage(lineage_content(BRANCH)) == BRANCH


def test_tokens_of_lost_updates_count_as_older_by_the_way_back() -> None:
    spans = [VersionSpan(4, 0, 1), VersionSpan(6, 1, 2), VersionSpan(8, 2, 3)]
    present = recount(spans, 5, THIRD)
    assert present == (spans[0], VersionSpan(6, 1, 2, lost=1, epoch=1), VersionSpan(8, 2, 3, lost=3, epoch=2))
    assert [span.counts_as for span in present] == [4, 4, 2]
    assert [span.lost for span in recount(present, 3, BRANCH)] == [1, 3, 5]
    assert recount(present, 9, THIRD) == present  # what is lost does not come back
