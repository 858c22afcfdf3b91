"""A reward of one's own: right answers, a little for the right form, and a price for each token."""

from __future__ import annotations

import re

from megarl import RewardInput, RewardResult

BOX = re.compile(r"\\boxed\{(\d+)\}")


def short_and_right(sample: RewardInput, price: float = 0.01) -> RewardResult:
    r"""Return 1 for the right number in a \boxed{}, 0.2 for another number in it, less `price` for each token.

    Each component becomes a metric, `reward/component/right` for example. `price` is set by `reward.kwargs`.
    """
    boxes = BOX.findall(sample.response)
    right = float(bool(boxes) and boxes[-1] == sample.answer)
    score = max(right, 0.2 * bool(boxes)) - price * len(sample.token_ids)
    return RewardResult(score, {"right": right, "boxed": float(bool(boxes))}, answer=boxes[-1] if boxes else None)
