"""Time-outs that are remembered, alone and in a pool."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.answer_size import is_too_large
from megarl.rewards.remembered import RememberedTimeouts
from megarl.rewards.types import RewardInput
from tests.support.reward_pool import make_reward_pool, score_all, worker_pids


@given(st.lists(st.integers(0, 20), max_size=100), st.integers(1, 8))
def test_the_latest_keys_are_remembered_and_answered_from_their_second_time_out(keys: list[int], capacity: int) -> None:
    remembered, counts = RememberedTimeouts(capacity), dict[int, int]()
    for time_, key in enumerate(keys):
        remembered.add(str(key), f"late {time_}", time_, time_ + 1)
        counts[key] = counts.pop(key, 0) + 1
        for oldest in list(counts)[:-capacity]:
            del counts[oldest]
        assert len(remembered) == len(counts) <= capacity
    assert {key for key in set(keys) if remembered.get(str(key))} == {key for key in counts if counts[key] > 1}
    latest = {key: f"late {time_}" for time_, key in enumerate(keys)}
    assert all(remembered.get(str(key)) == latest[key] for key, count in counts.items() if count > 1)


def test_time_outs_that_overlap_count_once() -> None:
    remembered = RememberedTimeouts()
    for began in (0.0, 1.0, 1.5):
        remembered.add("pair", "late", began, began + 2.0)
    assert remembered.get("pair") is None
    remembered.add("pair", "late", 2.0, 4.0)
    assert remembered.get("pair") == "late"


def test_a_result_makes_those_before_it_count_no_more() -> None:
    remembered = RememberedTimeouts()
    for began in (0.0, 10.0):
        remembered.add("pair", "late", began, began + 1.0)
        remembered.forget("pair")
    assert remembered.get("pair") is None and len(remembered) == 0
    remembered.forget("another")


def test_a_key_may_hold_any_text() -> None:
    remembered = RememberedTimeouts()
    for began in (0.0, 1.0):
        remembered.add("\ud800", "late", began, began + 1.0)
    assert remembered.get("\ud800") == "late" and remembered.get("") is None


def test_the_same_pair_of_answer_and_reference_times_out_twice() -> None:
    r"""Whatever else the responses say. The answer is one whose work the size check does not see."""
    slow = r"\int_0^1 \sin(\cos(x^x))^{x} + \sqrt{\tan(x^{\sin x})} \, dx"
    assert not is_too_large(slow)
    pool = make_reward_pool("math", timeout_s=0.001, workers=1, on_error="drop")
    try:
        samples = [RewardInput("", rf"{thought}: \boxed{{{slow}}}", answer="3") for thought in "abcdefgh"]
        first = [score_all(pool, [each])[0] for each in samples[:2]]
        begin = time.monotonic()
        outcomes = score_all(pool, samples[2:])
        assert time.monotonic() - begin < 0.5  # a process has not even started in that time
        assert {each.reason for each in (*first, *outcomes)} == {"timeout"} and all(each.dropped for each in outcomes)
        assert not any("the same answer as before" in str(each.error) for each in first)
        assert all("the same answer as before" in str(each.error) for each in outcomes)
    finally:
        pool.close()


def test_those_that_wait_while_a_pair_times_out_are_answered_from_the_memory() -> None:
    slow = r"\boxed{\int_0^1 \sin(\cos(x^x))^{x} \, dx}"
    pool = make_reward_pool("math", timeout_s=0.001, workers=1, on_error="drop")
    pool._sample_seconds = 1e-4  # as after many cheap samples: one batch for all
    try:
        outcomes = score_all(pool, [RewardInput("", slow, answer="3")] * 12)
        assert {each.reason for each in outcomes} == {"timeout"}
        assert ["the same answer as before" in str(each.error) for each in outcomes] == [False] * 2 + [True] * 10
    finally:
        pool.close()


def test_a_worker_that_was_stopped_once_costs_a_right_answer_one_sample_only() -> None:
    pool = make_reward_pool("math", timeout_s=2.0, workers=1, on_error="drop")
    right = RewardInput("", r"\boxed{72}", answer="72")
    try:
        for _ in range(2):  # the result between the two stalls makes the first count no more
            asyncio.run(pool.start())
            assert score_all(pool, [right])[0].score == 1.0
            (pid,) = worker_pids(pool)
            os.kill(pid, signal.SIGSTOP)
            assert score_all(pool, [right])[0].reason == "timeout"
        assert score_all(pool, [right])[0].score == 1.0
    finally:
        pool.close()
