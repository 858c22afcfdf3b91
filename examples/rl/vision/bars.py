"""The reward of `make vision`: the colour of a bar, and nothing else."""

from __future__ import annotations

from megarl import RewardResult


def reward(response: str, answer: str) -> RewardResult:
    """Return 1 if the response is the word of the answer, else 0."""
    said = response.strip()
    return RewardResult(float(said == answer), answer=said)
