"""Time-outs that are remembered, alone and in a pool."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.remembered import RememberedTimeouts
from megarl.rewards.types import RewardInput
from tests.support.reward_pool import make_reward_pool, score_all


@given(st.lists(st.integers(0, 20), max_size=100), st.integers(1, 8))
def test_the_latest_keys_are_remembered_and_no_more(keys: list[int], capacity: int) -> None:
    remembered = RememberedTimeouts(capacity)
    for key in keys:
        remembered.add(str(key), f"late {key}")
        assert len(remembered) <= capacity
    latest = list(dict.fromkeys(reversed(keys)))
    assert {key for key in set(keys) if remembered.get(str(key))} == set(latest[:capacity])
    assert all(remembered.get(str(key)) == f"late {key}" for key in latest[:capacity])


def test_a_key_may_hold_any_text() -> None:
    remembered = RememberedTimeouts()
    remembered.add("\ud800", "late")
    assert remembered.get("\ud800") == "late" and remembered.get("") is None


def test_the_same_pair_of_answer_and_reference_times_out_once() -> None:
    r"""Whatever else the responses say. The answer is one whose work the size check does not see."""
    slow = r"\int_0^1 \sin(\cos(x^x))^{x} + \sqrt{\tan(x^{\sin x})} \, dx"
    pool = make_reward_pool("math", timeout_s=0.001, workers=1, on_error="drop")
    try:
        answers = [rf"{thought}: \boxed{{{slow}}}" for thought in "abcdefgh"]
        first = score_all(pool, [RewardInput("", each, answer="3") for each in answers[:1]])
        begin = time.monotonic()
        outcomes = score_all(pool, [RewardInput("", each, answer="3") for each in answers[1:]])
        assert time.monotonic() - begin < 0.5  # a process has not even started in that time
        assert {each.reason for each in (*first, *outcomes)} == {"timeout"} and all(each.dropped for each in outcomes)
        assert all("the same answer as before" in str(each.error) for each in outcomes)
    finally:
        pool.close()
