"""A custom loss and advantage: TOPR (arXiv:2503.14286) with token-level ratios, and a median baseline.

A config names them by their import paths:

    algorithm:
      loss: examples.tutorials.own_loss.topr:topr
      loss_options: {cap: 1.0}
      advantage: examples.tutorials.own_loss.topr:above_median

    python -m examples.tutorials.own_loss.topr      # checks both, as every run with them does before it starts
"""

from __future__ import annotations

import statistics

from pydantic import Field

from megarl import Advantages, GroupRewards, Section, TokenInputs, TokenLoss, check_advantage, check_loss


class TOPROptions(Section):
    """The bound of the importance weight."""

    cap: float = Field(1.0, gt=0, description="Largest weight of a token with a negative advantage.")


def topr(inputs: TokenInputs, options: TOPROptions) -> TokenLoss:
    """Return -sg[w] A log pi of each token: w is 1 if A >= 0, else min(ratio, cap)."""
    ratio_R, negative_R = inputs.ratio.detach(), inputs.advantages_R < 0
    weight_R = ratio_R.clamp(max=options.cap).where(negative_R, 1.0)
    return TokenLoss(-weight_R * inputs.advantages_R * inputs.logprobs_R, high_R=negative_R & (ratio_R > options.cap))


def above_median(batch: GroupRewards) -> Advantages:
    """Return r - the group's median, which one extreme reward does not move."""
    return [[reward - statistics.median(group) for reward in group] for group in batch.rewards]


if __name__ == "__main__":
    check_loss("examples.tutorials.own_loss.topr:topr", cap=0.9)
    check_advantage("examples.tutorials.own_loss.topr:above_median")
    print("both meet their contracts")
