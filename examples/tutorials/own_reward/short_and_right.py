"""A custom reward: right answers, a little for the right format, and a price per token."""

from __future__ import annotations

import re

from megarl import RewardInput, RewardResult

BOX = re.compile(r"\\boxed\{(\d+)\}")


def short_and_right(sample: RewardInput, price: float = 0.01) -> RewardResult:
    r"""Return 1 for the right number in a \boxed{}, 0.2 for another number in it, minus `price` per token.

    Each component becomes a metric, for example `reward/component/right`. `reward.kwargs` sets `price`.
    """
    boxes = BOX.findall(sample.response)
    right = float(bool(boxes) and boxes[-1] == sample.answer)
    score = max(right, 0.2 * bool(boxes)) - price * len(sample.token_ids)
    return RewardResult(score, {"right": right, "boxed": float(bool(boxes))}, answer=boxes[-1] if boxes else None)
