"""Advantages of prompt groups, and the shaping of rewards that comes before them. Pure Python on floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]
TruncatedPolicy = Literal["keep", "mask", "zero_reward"]


def group_advantages(rewards: Sequence[Sequence[float]], kind: AdvantageKind, eps: float = 1e-4) -> list[list[float]]:
    """Return the advantages of each group, in the order of `rewards`.

    `rewards[g]` holds the rewards of those samples of group g that did not fail.

    - `grpo`: (r - mean) / (std + eps) with the sample standard deviation (n - 1), as in TRL and verl
      (arXiv:2402.03300 section 4.1.2); the default of `eps` is TRL's.
    - `dr_grpo`: r - mean (arXiv:2503.20783): dividing by std favours prompts that are too easy or too hard.
    - `rloo`: r_i - mean of the others = n / (n - 1) * (r_i - mean) (arXiv:2402.14740).

    Groups may differ in size. The advantages of a group of one sample, or of equal rewards, are exactly 0.

    Raises:
        ValueError: the kind is unknown, or a reward is not finite.
    """
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"unknown advantage {kind!r}; use grpo, dr_grpo or rloo")
    return [_one_group(group, kind, eps) for group in rewards]


def _one_group(rewards: Sequence[float], kind: AdvantageKind, eps: float) -> list[float]:
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if zero_variance(rewards):
        return [0.0] * len(rewards)
    n = len(rewards)
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    if kind == "grpo":
        std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1))
        return [c / (std + eps) for c in centred]
    if kind == "rloo":
        return [c * n / (n - 1) for c in centred]
    return centred


def zero_variance(rewards: Sequence[float]) -> bool:
    """Tell whether all rewards are equal to within 1e-8, so that all advantages are 0. True below two samples."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-8


def overlong_penalty(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13), which is <= 0 and is added to the reward.

    It is 0 up to `max_tokens - buffer` response tokens, falls linearly to `-penalty` at `max_tokens`, and stays there.
    `buffer` 0 turns it off.

    Raises:
        ValueError: the buffer is negative or longer than `max_tokens`.
    """
    if buffer == 0:
        return 0.0
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"overlong buffer of {buffer} tokens must be within 0..max_tokens ({max_tokens})")
    excess = length - (max_tokens - buffer)
    return -penalty * min(max(excess, 0) / buffer, 1.0)


def apply_truncation(policy: TruncatedPolicy, truncated: bool, reward: float) -> tuple[float, bool]:
    """Return one sample's reward, and whether its tokens enter the loss, under the policy `sampling.truncated`.

    `mask` keeps a truncated sample's reward in its group's statistics (DAPO's overlong filtering, arXiv:2503.14476
    section 3.4).

    Raises:
        ValueError: the policy is unknown.
    """
    if policy not in ("keep", "mask", "zero_reward"):
        raise ValueError(f"unknown sampling.truncated {policy!r}; use keep, mask or zero_reward")
    if not truncated or policy == "keep":
        return reward, True
    return (reward, False) if policy == "mask" else (0.0, True)
