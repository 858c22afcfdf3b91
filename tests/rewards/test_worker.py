"""Scoring of one sample in a reward process, without the process."""

import pickle

import pytest

from megarl.rewards.registry import as_result as convert
from megarl.rewards.types import ErrorReason, RewardInput, RewardResult
from megarl.rewards.worker import score


def refused(sample: RewardInput) -> RewardResult:
    return convert("no number")


def as_result(sample: RewardInput) -> RewardResult:
    """A function of a user that has the name of the conversion."""
    raise LookupError("no verdict")


@pytest.mark.parametrize(("function", "reason"), [(refused, "invalid"), (as_result, "exception")])
def test_only_the_conversion_makes_a_result_invalid(function: object, reason: ErrorReason) -> None:
    answer = score([function], pickle.dumps((0, RewardInput("", "x"))))  # type: ignore[list-item]
    assert answer.reason == reason and answer.error
