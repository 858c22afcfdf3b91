r"""The geometry3k reward: nine tenths for the right answer, one tenth for the format the prompt asks for."""

from __future__ import annotations

import re

from megarl import RewardInput, RewardResult, math

ANSWER, FORM = 0.9, 0.1
_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def reward(sample: RewardInput) -> RewardResult:
    r"""Return 0.9 if the response's box holds the right answer, plus 0.1 for the right format.

    The weights and the format, `<think>...</think>...\boxed{...}`, are those of verl's
    verl/utils/reward_score/geo3k.py. Equality with the reference is decided mathematically, as for other problems.
    """
    judged = math(sample, require_box=True, answer_after=None)
    form = float(_FORM.fullmatch(sample.response) is not None)
    score = ANSWER * judged.components["correct"] + FORM * form
    return RewardResult(score, judged.components | {"form": form}, judged.answer)
