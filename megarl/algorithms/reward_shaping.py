"""The shaping of rewards that comes before advantages: overlong responses, truncated ones. Pure Python on floats."""

from __future__ import annotations

from typing import Literal

TruncatedPolicy = Literal["keep", "mask", "zero_reward"]


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
