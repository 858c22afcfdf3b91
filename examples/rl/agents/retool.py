"""ReTool's reward: the answer in the box is right or wrong, and a wrong one costs less after calls of the tool."""

from __future__ import annotations

from megarl import RewardInput, RewardResult, math

PER_ROUND, MOST = 0.1, -0.6


def reward(sample: RewardInput) -> RewardResult:
    """Return 1 for a right answer. A wrong one is worth -1, and 0.1 more for each turn with calls, up to -0.6.

    These numbers are as in verl's recipe/retool/retool.py, which counts the turns of a dialogue in which each turn with
    calls adds two. There an answer is right if the last box within the last 100 characters is the reference letter for
    letter; here, if the last box of the last turn equals it mathematically.
    """
    judged = math(sample, require_box=True)
    rounds = sum(turn.role == "assistant" and bool(turn.calls) for turn in sample.turns)
    score = 1.0 if judged.components["correct"] else min(MOST, -1.0 + PER_ROUND * rounds)
    return RewardResult(score, judged.components | {"rounds": float(rounds)}, judged.answer)
