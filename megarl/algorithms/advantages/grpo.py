"""GRPO's advantage (arXiv:2402.03300 section 4.1.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from megarl.algorithms.interface.group_rewards import ADVANTAGES, Advantages, GroupRewards, centred
from megarl.common.options import Section


class GRPOOptions(Section):
    """The number that keeps the division finite; the default is TRL's, verl has 1e-6."""

    eps: float = Field(1e-4, ge=0, description="Added to the standard deviation.")


@ADVANTAGES.register("grpo", title="(r - mean) / std of the group", paper="arXiv:2402.03300")
def grpo(batch: GroupRewards, options: GRPOOptions) -> Advantages:
    """Return (r - mean) / (std + eps) with the sample standard deviation (n - 1), as in TRL and verl."""
    return [standardised(group, options.eps) for group in batch.rewards]


def standardised(rewards: Sequence[float], eps: float) -> list[float]:
    """Return (r - mean) / (std + eps); exactly 0 for equal rewards."""
    values = centred(rewards)
    if not any(values):
        return values
    std = math.sqrt(math.fsum(value * value for value in values) / (len(values) - 1))
    return [value / (std + eps) for value in values]
