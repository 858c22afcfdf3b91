"""PPO's clipped surrogate, which GRPO and DAPO minimise too: PPO (arXiv:1707.06347 eq. 7), GRPO (arXiv:2402.03300
eq. 3), clip-higher (DAPO, arXiv:2503.14476 eq. 8), dual clip (arXiv:1912.09729 eq. 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from megarl.algorithms.interface.token_loss import LOSSES, TokenInputs, TokenLoss
from megarl.common.options import Section

if TYPE_CHECKING:
    from torch import Tensor


class PPOOptions(Section):
    """The range in which the ratio has a gradient."""

    clip_low: float = Field(0.2, ge=0, lt=1, description="Lower clip: ratio >= 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="Upper clip: ratio <= 1 + clip_high.")
    clip_dual: float | None = Field(None, gt=1, description="Dual clip c for negative advantages; null = off.")


@LOSSES.register("ppo", title="PPO clip of the token's ratio (GRPO, DAPO)", paper="arXiv:1707.06347")
def ppo(inputs: TokenInputs, options: PPOOptions) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token, r its own ratio."""
    return clipped_surrogate(inputs.ratio, inputs, options)


def clipped_surrogate(ratio_R: Tensor, inputs: TokenInputs, options: PPOOptions) -> TokenLoss:
    """Return the clipped surrogate of any ratio, [R] with gradient.

    `clip_dual` c bounds the objective from below by c A where A < 0.
    """
    advantages_R, low, high = inputs.advantages_R, 1.0 - options.clip_low, 1.0 + options.clip_high
    loss_R = -(ratio_R * advantages_R).minimum(ratio_R.clamp(low, high) * advantages_R)
    positive_R, negative_R = advantages_R > 0, advantages_R < 0
    dual_R = None
    if options.clip_dual is not None:
        bound_R = -options.clip_dual * advantages_R
        dual_R = negative_R & (loss_R.detach() > bound_R)
        loss_R = loss_R.minimum(bound_R).where(negative_R, loss_R)
    return TokenLoss(loss_R, ratio_R, negative_R & (ratio_R < low), positive_R & (ratio_R > high), dual_R)
