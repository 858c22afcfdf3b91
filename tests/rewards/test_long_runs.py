"""The samples of twenty thousand steps: a reward pool keeps nothing of those that it has scored."""

import threading

import psutil
import pytest

from megarl.rewards.types import RewardInput
from tests.support.measures.growth import held_bytes, in_own_process, slopes_over
from tests.support.rewards.reward_pool import make_reward_pool, score_all

pytestmark = pytest.mark.slow

STEPS, AT_ONCE = 20_000, 200


def sample(number: int) -> RewardInput:
    """Most are scored, some raise, and a few end their process."""
    command = "raise it" if number % 9 == 8 else "number 0.5"
    return RewardInput("", "crash" if number % 4001 == 4000 else command, [], "stop")


def slopes_of_a_pool() -> dict[str, float]:
    pool = make_reward_pool("tests.support.rewards.reward_functions:by_response", workers=2)

    def take_steps(turn: int) -> None:
        outcomes = score_all(pool, [sample(turn * AT_ONCE + number) for number in range(AT_ONCE)])
        assert {outcome.score for outcome in outcomes} == {0.0, 0.5}

    def sizes() -> dict[str, float]:
        own = psutil.Process()
        kept = (pool._tasks, pool._running, pool._failures, pool._started, list(pool._processes))
        return {
            "bytes held": held_bytes(kept) + held_bytes([each.by_reason for each in pool._failures]),
            "threads": threading.active_count(),
            "descriptors": own.num_fds(),
            "processes": len(own.children()),
        }

    try:
        return slopes_over(STEPS // AT_ONCE, 2, take_steps, sizes)
    finally:
        pool.close()


def test_a_reward_pool_keeps_nothing_of_what_it_has_scored() -> None:
    slopes = in_own_process(slopes_of_a_pool)
    assert slopes["bytes held"] < AT_ONCE / 10, slopes
    assert all(slopes[name] < 1 / (STEPS / AT_ONCE) for name in ("threads", "descriptors", "processes")), slopes
