"""Garbage collection in processes with many objects: young cycles go, and old objects are not visited."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from megarl.common.process.memory_tuning import (
    begin_start,
    collect_for_loops,
    collect_young_objects,
    collections_paused,
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


def test_young_cycles_are_freed_and_old_objects_are_left_alone() -> None:
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    collect_young_objects()
    gc.callbacks.append(note)
    try:
        gone = weakref.ref(Cycle())
        kept = [[number] for number in range(200_000)]
    finally:
        gc.callbacks.remove(note)
    assert gone() is None
    assert len(generations) > 200 and set(generations) == {0}, "each of them takes time for all that is young"
    assert len(kept) == 200_000


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


def test_nothing_is_collected_meanwhile_and_everything_after() -> None:
    with collections_paused():
        gone = weakref.ref(Cycle())
        kept = [[number] for number in range(200_000)]
        assert gone() is not None
    kept += [[number] for number in range(200_000)]
    assert gone() is None and gc.isenabled() and len(kept) == 400_000
    gc.disable()
    try:
        with collections_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
