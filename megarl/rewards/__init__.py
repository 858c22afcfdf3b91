"""Reward functions (user functions and the shipped `gsm8k`, `math` and `code`), run in processes that can be killed."""

from megarl.rewards.registry import resolve
from megarl.rewards.types import RewardInput, RewardResult
from megarl.rewards.worker_pool import RewardPool, RewardPoolError

__all__ = ["RewardInput", "RewardPool", "RewardPoolError", "RewardResult", "resolve"]
