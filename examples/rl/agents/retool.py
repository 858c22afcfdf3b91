"""ReTool's reward: the boxed answer is right or wrong, and a wrong one costs less after tool calls."""

from __future__ import annotations

from megarl import RewardInput, RewardResult, math

PER_ROUND, MOST = 0.1, -0.6


def reward(sample: RewardInput) -> RewardResult:
    """Return 1 for a right answer. A wrong one is worth -1, and 0.1 more for each turn with calls, up to -0.6.

    These numbers are as in verl's recipe/retool/retool.py, which counts dialogue turns, so each turn with calls adds
    two. There an answer is right if the last box in the last 100 characters matches the reference exactly; here, if the
    last turn's last box equals it mathematically.
    """
    judged = math(sample, require_box=True)
    rounds = sum(turn.role == "assistant" and bool(turn.calls) for turn in sample.turns)
    score = 1.0 if judged.components["correct"] else min(MOST, -1.0 + PER_ROUND * rounds)
    return RewardResult(score, judged.components | {"rounds": float(rounds)}, judged.answer)
