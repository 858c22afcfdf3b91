r"""Answers that sympy works on for hours: a reward process is busy with one until its time-out, or its memory is full.

Seen with sympy 1.14.0, math-verify 0.9.0 and latex2sympy2_extended 1.11.0.
"""

import pytest

from megarl.rewards.types import RewardInput
from tests.support.rewards.reward_pool import make_reward_pool, score_all

pytestmark = pytest.mark.slow

ATTACKS = [r"\boxed{9^{9^{9^9}}}", r"\boxed{\left(10^{8}\right)!}", r"The answer is $10^{10^{10^{10}}}$."]
TIMEOUT_S = 4.0  # of a reward; a sound one takes milliseconds


@pytest.mark.parametrize("response", ATTACKS)
def test_the_attack_succeeds_without_the_look_at_sizes(response: str) -> None:
    pool = make_reward_pool("tests.support.rewards.reward_functions:math_of_any_size", timeout_s=TIMEOUT_S)
    try:
        sound, held = score_all(
            pool, [RewardInput("", r"\boxed{3}", answer="3"), RewardInput("", response, answer="3")]
        )
    finally:
        pool.close()
    assert (sound.score, sound.error) == (1.0, None)
    assert held.error is not None and held.reason in ("timeout", "memory")


def test_the_attacks_fail_on_the_shipped_reward() -> None:
    pool = make_reward_pool("math", timeout_s=TIMEOUT_S)
    samples = [RewardInput("", response, answer="3") for response in ATTACKS]
    try:
        score_all(pool, [RewardInput("", r"\boxed{3}", answer="3")])  # it has started
        outcomes = score_all(pool, samples)
    finally:
        pool.close()
    assert [(each.score, each.error) for each in outcomes] == [(0.0, None)] * len(ATTACKS)
