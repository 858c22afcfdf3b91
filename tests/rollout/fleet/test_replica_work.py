"""The speed of each engine: tokens over the time with work, up to the last report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.fleet.speed import ReplicaWork, rate_metrics
from megarl.telemetry.metrics.declarations import REGISTRY


def test_time_without_work_does_not_count_and_calls_that_overlap_count_once() -> None:
    work = ReplicaWork()
    work.begin(0, 10.0)
    work.begin(0, 11.0)
    work.note(0, 30, 12.0)
    work.end(0, 12.0)
    work.note(0, 10, 14.0)
    work.end(0, 14.0)
    work.begin(0, 100.0)
    work.note(0, 20, 102.0)
    assert work.take() == {0: 10.0}
    work.note(0, 8, 104.0)
    assert work.take() == {0: 4.0}
    work.end(0, 104.0)
    assert work.take() == {}


def test_time_without_tokens_counts_with_the_next_ones() -> None:
    work = ReplicaWork()
    work.begin(3, 0.0)
    work.note(3, 0, 9.0)
    assert work.take() == {}, "an engine that has reported nothing yet is not called slow"
    work.note(3, 20, 10.0)
    assert work.take() == {3: 2.0}
    work.end(3, 12.0)
    assert work.take() == {}
    work.begin(3, 50.0)
    work.note(3, 8, 52.0)
    assert work.take() == {3: 2.0}


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "note", "end", "take"]), st.integers(0, 2), st.integers(1, 9)),
                 max_size=60)  # fmt: skip


@given(STEPS)
def test_no_token_and_no_second_is_lost_or_counted_twice(steps: list[tuple[str, int, int]]) -> None:
    work, calls, now = ReplicaWork(), [0, 0, 0], 0.0
    tokens, busy = [0, 0, 0], [0.0, 0.0, 0.0]  # since the last take with a rate

    def check() -> None:
        rates = work.take()
        for replica in range(3):
            if tokens[replica]:
                assert rates[replica] == pytest.approx(tokens[replica] / busy[replica])
                tokens[replica], busy[replica] = 0, 0.0
            else:
                assert replica not in rates

    for action, replica, amount in steps:
        now += amount
        pending = [amount if count else 0 for count in calls]
        for index in range(3):
            busy[index] += pending[index]
        if action == "begin":
            work.begin(replica, now)
            calls[replica] += 1
        elif action == "take":
            for index in range(3):  # the time up to now is known only with a report
                if calls[index]:
                    work.note(index, 0, now)
            check()
        elif calls[replica] and action == "note":
            work.note(replica, amount, now)
            tokens[replica] += amount
        elif calls[replica]:
            work.end(replica, now)
            calls[replica] -= 1
    for index in range(3):
        if calls[index]:
            work.note(index, 0, now)
    check()


def test_the_metrics_are_declared_and_have_the_extremes() -> None:
    values = rate_metrics({0: 5.0, 7: 2.0})
    assert values["rollout/replica_tokens_per_second_min"] == 2.0
    assert values["rollout/replica_tokens_per_second_max"] == 5.0
    assert values["rollout/replica_tokens_per_second/7"] == 2.0 and rate_metrics({}) == {}
    for name in values:
        REGISTRY.lookup(name)
