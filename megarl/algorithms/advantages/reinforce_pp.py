"""REINFORCE++ (arXiv:2501.03262): advantages are normalised over the whole batch, not within the group.

The mean and the variance are over trained tokens, so that a long response counts as often as it has tokens, as in the
paper's code (OpenRLHF) and in verl. The variance is the sample variance (n - 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from megarl.algorithms.interface.group_rewards import ADVANTAGES, Advantages, GroupRewards, centred
from megarl.common.options import Section


class ReinforceOptions(Section):
    """The number that keeps the division finite; the default is verl's."""

    eps: float = Field(1e-8, gt=0, description="Added to the variance.")


@ADVANTAGES.register("reinforce_pp", title="r, normalised over the tokens of the batch", paper="arXiv:2501.03262")
def reinforce_pp(batch: GroupRewards, options: ReinforceOptions) -> Advantages:
    """Return (r - mean) / sqrt(var + eps) over the batch. A group of equal rewards has a signal too.

    The paper's KL to the reference is a part of the reward: `algorithm.kl.where: reward`.
    """
    return _normalised(batch.rewards, batch.tokens, options.eps)


@ADVANTAGES.register(
    "reinforce_pp_baseline", title="r - mean of the group, normalised over the tokens of the batch",
    paper="arXiv:2501.03262",
)  # fmt: skip
def reinforce_pp_baseline(batch: GroupRewards, options: ReinforceOptions) -> Advantages:
    """Return (x - mean) / sqrt(var + eps) over the batch, x = r - mean of the group."""
    return _normalised([centred(group) for group in batch.rewards], batch.tokens, options.eps)


def _normalised(values: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], eps: float) -> Advantages:
    """Return the values with mean 0 and variance 1 over all tokens; all 0 if there are fewer than two tokens."""
    pairs = [
        (value, count) for group, counts in zip(values, tokens, strict=True)
        for value, count in zip(group, counts, strict=True)
    ]  # fmt: skip
    total = sum(count for _, count in pairs)
    if total < 2:
        return [[0.0] * len(group) for group in values]
    mean = math.fsum(value * count for value, count in pairs) / total
    variance = math.fsum((value - mean) ** 2 * count for value, count in pairs) / (total - 1)
    scale = 1.0 / math.sqrt(variance + eps)
    return [[(value - mean) * scale for value in group] for group in values]
