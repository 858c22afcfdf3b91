"""The speed of each engine: tokens over the time with work, and the decision that one is too slow to be used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.fleet.speed import SLOW, Progress, Work, rate_metrics
from megarl.telemetry.metrics.declarations import REGISTRY

PATIENCE_S = 120.0


def feed(
    rates: dict[int, Progress], speeds: dict[int, float], start: float, end: float, step: float = 2.0
) -> dict[int, float]:
    """Let each replica report every `step` seconds on 16 responses; return when each was first found too slow."""
    found: dict[int, float] = {}
    now = start
    while now <= end:
        for replica, speed in speeds.items():
            progress = rates.setdefault(replica, Progress())
            slow = progress.note(round(16 * step * speed), 16 * step, rates.values(), now, PATIENCE_S)
            if slow and replica not in found:
                found[replica] = now
        now += step
    return found


def test_an_engine_that_becomes_twenty_times_slower_is_found_and_no_other() -> None:
    rates: dict[int, Progress] = {}
    assert feed(rates, {0: 50.0, 1: 48.0, 2: 55.0}, 0.0, 600.0) == {}
    found = feed(rates, {0: 50.0, 1: 48.0 / 20, 2: 55.0}, 600.0, 1200.0)
    assert list(found) == [1] and PATIENCE_S <= found[1] - 600.0 <= PATIENCE_S + 180.0


def test_a_start_that_takes_long_is_no_reason() -> None:
    rates: dict[int, Progress] = {}
    assert feed(rates, {0: 50.0, 1: 1.0}, 0.0, 0.9 * PATIENCE_S) == {}
    assert feed(rates, {0: 50.0, 1: 45.0}, 0.9 * PATIENCE_S, 600.0) == {}


def test_a_replica_that_is_slow_again_has_its_whole_time_again() -> None:
    other, slow = Progress(5000, 100.0), Progress()

    def note(tokens: int, seconds: float, now: float) -> str:
        return slow.note(tokens, seconds, [other, slow], now, PATIENCE_S)

    assert note(10, 100.0, 0.0) == ""
    assert note(100_000, 100.0, 0.5 * PATIENCE_S) == "", "it has caught up"
    assert note(0, 100_000.0, 2.0 * PATIENCE_S) == "", "it has only become slow"
    assert note(0, 100.0, 2.9 * PATIENCE_S) == "" != note(0, 100.0, 3.0 * PATIENCE_S)


def test_one_replica_that_is_much_faster_makes_no_other_one_slow() -> None:
    assert feed({}, {0: 50.0, 1: 50.0, 2: 55.0, 3: 100 * SLOW}, 0.0, 400.0) == {}


@given(st.dictionaries(st.integers(0, 7), st.floats(10.0, 10.0 * SLOW), min_size=1, max_size=6))
def test_engines_whose_speeds_are_within_the_factor_are_all_kept(speeds: dict[int, float]) -> None:
    assert feed({}, speeds, 0.0, 400.0) == {}


@given(st.integers(1, 5), st.floats(1.0, 200.0), st.floats(2.5, 100.0))
def test_whoever_is_far_below_the_others_is_found_whatever_the_speed(others: int, speed: float, factor: float) -> None:
    speeds = dict.fromkeys(range(others), speed * 100) | {9: speed * 100 / (SLOW * factor)}
    assert list(feed({}, speeds, 0.0, 400.0)) == [9]


def test_one_engine_alone_is_never_slow_and_what_is_forgotten_is_not_compared() -> None:
    rates: dict[int, Progress] = {}
    assert feed(rates, {3: 0.01}, 0.0, 600.0) == {}
    feed(rates, {4: 50.0}, 600.0, 610.0)
    rates[4] = Progress()
    assert feed(rates, {3: 0.01}, 610.0, 1200.0) == {}


def test_a_report_without_progress_of_any_response_says_nothing() -> None:
    assert Progress().note(0, 0.0, [Progress(50, 1.0)], 5.0, 0.0) == ""


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "note", "end", "take"]), st.integers(1, 9)), max_size=60)


@given(STEPS)
def test_no_token_and_no_second_is_lost_or_counted_twice(steps: list[tuple[str, int]]) -> None:
    work, calls, now = Work(), 0, 0.0
    tokens, busy = 0, 0.0  # since the last take with a rate
    for action, amount in [*steps, ("take", 1)]:
        now += amount
        busy += amount if calls else 0
        if action == "begin":
            work.begin(now)
            calls += 1
        elif action == "take":
            if calls:  # the time up to now is known only with a report
                work.note(0, now)
            assert work.take() == (pytest.approx(tokens / busy) if tokens else None)
            tokens, busy = (0, 0.0) if tokens else (0, busy)
        elif calls and action == "note":
            work.note(amount, now)
            tokens += amount
        elif calls:
            work.end(now)
            calls -= 1


def test_time_without_work_does_not_count_and_calls_that_overlap_count_once() -> None:
    work = Work()
    work.begin(10.0)
    work.begin(11.0)
    work.note(30, 12.0)
    work.end(12.0)
    work.note(10, 14.0)
    work.end(14.0)
    work.begin(100.0)
    work.note(20, 102.0)
    assert work.take() == 10.0
    work.note(8, 104.0)
    assert work.take() == 4.0
    work.end(106.0)
    assert work.take() is None
    work.begin(200.0)
    work.note(8, 202.0)
    assert work.take() == 2.0, "the seconds up to the end of a call count with the next tokens"


def test_the_metrics_are_declared_and_have_the_extremes() -> None:
    values = rate_metrics({0: Work(tokens=10, busy_s=2.0), 3: Work(), 7: Work(tokens=6, busy_s=3.0)})
    assert values["rollout/replica_tokens_per_second_min"] == 2.0
    assert values["rollout/replica_tokens_per_second_max"] == 5.0
    assert values["rollout/replica_tokens_per_second/7"] == 2.0 and rate_metrics({0: Work()}) == {}
    for name in values:
        REGISTRY.lookup(name)
