"""Garbage collection in processes with many objects: young cycles go, and old objects are not visited."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from megarl.common.process.memory_tuning import (
    begin_start,
    collect_for_loops,
    end_start,
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_a_start_collects_rarely_and_its_end_sets_the_thresholds_back() -> None:
    gc.set_threshold(700, 10, 10)  # Python's own
    begin_start()
    assert gc.get_threshold()[0] > 7000
    end_start()
    try:
        assert gc.get_threshold() == (700, 10, 10)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("shipped", [True, False])
def test_cycles_that_have_grown_old_go_where_loops_of_others_run(shipped: bool) -> None:
    """A client of HTTP outlives many collections of young objects before it is given up."""
    gc.collect()
    collect_for_loops(shipped=shipped)
    cycle = Cycle()
    kept = [[number] for number in range(200_000)]  # it grows old
    old = weakref.ref(cycle)
    del cycle
    kept += [[number] for number in range(2_000_000)]
    assert (old() is None) is not shipped
    assert len(kept) == 2_200_000
