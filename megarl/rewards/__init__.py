"""Rewards: user functions and the shipped `gsm8k` and `math`, run in a pool of killable processes."""

from megarl.rewards.pool import RewardPool, RewardPoolError
from megarl.rewards.resolve import resolve
from megarl.rewards.types import RewardInput, RewardOutcome, RewardResult

__all__ = ["RewardInput", "RewardOutcome", "RewardPool", "RewardPoolError", "RewardResult", "resolve"]
