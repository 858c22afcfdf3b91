"""The decision that an engine is too slow to be used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.fleet.speed import SLOW, ProgressRates

PATIENCE_S = 120.0


def feed(
    rates: ProgressRates, speeds: dict[int, float], start: float, end: float, step: float = 2.0
) -> dict[int, float]:
    """Let each replica report every `step` seconds on 16 responses; return when each was first found too slow."""
    found: dict[int, float] = {}
    now = start
    while now <= end:
        for replica, speed in speeds.items():
            if rates.note(replica, round(16 * step * speed), 16 * step, now) and replica not in found:
                found[replica] = now
        now += step
    return found


def test_an_engine_that_becomes_twenty_times_slower_is_found_and_no_other() -> None:
    rates = ProgressRates(PATIENCE_S)
    assert feed(rates, {0: 50.0, 1: 48.0, 2: 55.0}, 0.0, 600.0) == {}
    found = feed(rates, {0: 50.0, 1: 48.0 / 20, 2: 55.0}, 600.0, 1200.0)
    assert list(found) == [1] and PATIENCE_S <= found[1] - 600.0 <= PATIENCE_S + 180.0


def test_a_start_that_takes_long_is_no_reason() -> None:
    rates = ProgressRates(PATIENCE_S)
    assert feed(rates, {0: 50.0, 1: 1.0}, 0.0, 0.9 * PATIENCE_S) == {}
    assert feed(rates, {0: 50.0, 1: 45.0}, 0.9 * PATIENCE_S, 600.0) == {}


def test_a_replica_that_is_slow_again_has_its_whole_time_again() -> None:
    rates = ProgressRates(PATIENCE_S)
    rates.note(0, 5000, 100.0, 0.0)
    assert rates.note(1, 10, 100.0, 0.0) == ""
    assert rates.note(1, 100_000, 100.0, 0.5 * PATIENCE_S) == "", "it has caught up"
    assert rates.note(1, 0, 100_000.0, 2.0 * PATIENCE_S) == "", "it has only become slow"
    assert rates.note(1, 0, 100.0, 2.9 * PATIENCE_S) == "" != rates.note(1, 0, 100.0, 3.0 * PATIENCE_S)


def test_one_replica_that_is_much_faster_makes_no_other_one_slow() -> None:
    assert feed(ProgressRates(PATIENCE_S), {0: 50.0, 1: 50.0, 2: 55.0, 3: 100 * SLOW}, 0.0, 400.0) == {}


@given(st.dictionaries(st.integers(0, 7), st.floats(10.0, 10.0 * SLOW), min_size=1, max_size=6))
def test_engines_whose_speeds_are_within_the_factor_are_all_kept(speeds: dict[int, float]) -> None:
    assert feed(ProgressRates(PATIENCE_S), speeds, 0.0, 400.0) == {}


@given(st.integers(1, 5), st.floats(1.0, 200.0), st.floats(2.5, 100.0))
def test_whoever_is_far_below_the_others_is_found_whatever_the_speed(others: int, speed: float, factor: float) -> None:
    speeds = dict.fromkeys(range(others), speed * 100) | {9: speed * 100 / (SLOW * factor)}
    assert list(feed(ProgressRates(PATIENCE_S), speeds, 0.0, 400.0)) == [9]


def test_one_engine_alone_is_never_slow_and_what_is_forgotten_is_not_compared() -> None:
    rates = ProgressRates(PATIENCE_S)
    assert feed(rates, {3: 0.01}, 0.0, 600.0) == {}
    feed(rates, {4: 50.0}, 600.0, 610.0)
    rates.forget(4)
    assert feed(rates, {3: 0.01}, 610.0, 1200.0) == {}


def test_a_report_without_progress_of_any_response_says_nothing() -> None:
    assert ProgressRates(0.0).note(0, 0, 0.0, 5.0) == ""
