"""The limit of requests per engine: no limit without need, never a standstill, and near what the engine can hold."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.fleet.router import DECREASE, ENDED_PER_INCREASE, FULL, BackPressure

PRESSED, CALM = EngineLoad(1.0, 10, 3), EngineLoad(0.5, 10, 0)


def test_there_is_no_limit_before_memory_is_short() -> None:
    """A full batch and a full cache are no pressure by themselves."""
    rules = BackPressure()
    for load in (CALM, EngineLoad(1.0, 256, 0), EngineLoad(FULL - 0.01, 256, 100)):
        rules.reported(0, load, 1000, 8)
    assert rules.limit(0) == math.inf and rules.full({0: 10**9}, 10**9) == set()


def test_pressure_lowers_the_limit_once_until_the_requests_above_it_have_ended() -> None:
    rules = BackPressure()
    rules.reported(0, PRESSED, 100, 0)
    assert rules.limit(0) == 100 * DECREASE == 75
    for in_flight in (100, 90, 76):
        rules.reported(0, PRESSED, in_flight, 5)
        assert rules.limit(0) == 75
    rules.reported(0, PRESSED, 72, 0)
    assert rules.limit(0) == 54
    rules.reported(0, CALM, 54, 16)
    assert rules.limit(0) == 54 + 16 / ENDED_PER_INCREASE
    assert rules.full({0: 50, 1: 500}, 6) == set() and rules.full({0: 50, 1: 500}, 7) == {0}
    rules.forget(0)
    assert rules.limit(0) == math.inf


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 50)), max_size=60), st.integers(1, 10**6))
def test_an_idle_replica_always_has_room_and_no_limit_is_below_one(
    reports: list[tuple[bool, int, int]], more: int
) -> None:
    rules = BackPressure()
    for pressed, in_flight, ended in reports:
        before = rules.limit(0)
        rules.reported(0, PRESSED if pressed else CALM, in_flight, ended)
        after = rules.limit(0)
        assert after >= 1 and rules.full({0: 0}, more) == set()
        if pressed:
            assert after == before or after == max(in_flight * DECREASE, 1.0)
        else:
            assert after == before + ended / ENDED_PER_INCREASE


@given(st.integers(16, 400), st.integers(1, 16))
def test_the_limit_stays_near_what_the_engine_can_hold(capacity: int, group: int) -> None:
    """An engine that is pressed above `capacity` requests, and groups that always wait: sawtooth below it."""
    rules, in_flight, seen = BackPressure(), 0, []
    for step in range(3000):
        while step and not rules.full({0: in_flight}, group) and in_flight < 4 * capacity:
            in_flight += group
        ended = min(in_flight, group)
        rules.reported(0, PRESSED if in_flight > capacity else CALM, in_flight, ended)
        in_flight -= ended
        if step > 2000:
            seen.append(in_flight + ended)
    assert max(seen) <= capacity + 2 * group + 2
    assert sum(seen) / len(seen) >= 0.6 * capacity - 2 * group
