"""A failed group is counted; what fails every time, or leaves nothing to go on with, ends the run."""

import pytest

from megarl.common.errors import NoReplicaLeft, RolloutError
from megarl.rewards.worker_pool import RewardPoolError
from megarl.rollout.orchestrator.prompt_groups import FailurePolicy


def test_a_failure_is_counted_until_as_many_fail_in_a_row_as_a_step_has() -> None:
    policy = FailurePolicy("count", limit=3)
    assert policy.decide(1, TimeoutError("late")) is None and policy.decide(2, TimeoutError("late")) is None
    policy.succeeded()
    assert policy.decide(3, ValueError("bad")) is None and policy.decide(4, ValueError("bad")) is None
    end = policy.decide(5, KeyError("x"))
    assert (
        end is not None and str(end) == "3 prompt groups in a row failed in rollout; the last, group 5: KeyError: 'x'"
    )


@pytest.mark.parametrize("error", [NoReplicaLeft(1, "replica 1 died"), RewardPoolError("no reward process")])
def test_without_engines_or_rewards_the_run_ends(error: Exception) -> None:
    end = FailurePolicy("count", limit=9).decide(0, error)
    assert isinstance(end, RolloutError) and str(error) in str(end)


def test_the_first_failure_ends_the_run_if_the_policy_says_so() -> None:
    end = FailurePolicy("stop", limit=9).decide(0, TimeoutError("late"))
    assert isinstance(end, RolloutError) and str(end) == "rollout failed: late"
