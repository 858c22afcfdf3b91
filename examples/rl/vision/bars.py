"""The reward of `make vision`: a bar's colour and nothing else."""

from __future__ import annotations

from megarl import RewardResult


def reward(response: str, answer: str) -> RewardResult:
    """Return 1 if the response is the answer's word, else 0."""
    said = response.strip()
    return RewardResult(float(said == answer), answer=said)
