"""Memory of a step, as every rank tells it."""

from __future__ import annotations

from megarl.run.performance import GIB
from tests.support.ranks.performance import HELD_B


def test_the_peak_is_the_highest_of_all_ranks_and_over_time(world) -> None:
    (first, resident_0), (second, resident_1) = world(2).run("tests.support.ranks.performance:peaks")
    assert first == second
    # Resident memory of rank 0, and of rank 1 by now, says nothing of what rank 1 held.
    assert first > max(resident_0, resident_1) + 0.5 * HELD_B / GIB
    assert first < resident_1 + 2 * HELD_B / GIB
