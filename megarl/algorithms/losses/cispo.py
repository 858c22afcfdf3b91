"""CISPO (MiniMax-M1, arXiv:2506.13585): the importance weight is clipped, and no token loses its gradient."""

from __future__ import annotations

from pydantic import Field

from megarl.algorithms.interface.token_loss import LOSSES, TokenInputs, TokenLoss
from megarl.common.options import Section


class CISPOOptions(Section):
    """The range of the importance weight. The paper bounds it above only; ScaleRL (arXiv:2510.13786) by 4 to 8."""

    clip_low: float | None = Field(None, ge=0, le=1, description="Weight >= 1 - clip_low; null = no lower bound.")
    clip_high: float = Field(4.0, ge=0, description="Weight <= 1 + clip_high.")


@LOSSES.register("cispo", title="REINFORCE with a clipped importance weight", paper="arXiv:2506.13585")
def cispo(inputs: TokenInputs, options: CISPOOptions) -> TokenLoss:
    """Return -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi of each token."""
    low, high = 1.0 - (1.0 if options.clip_low is None else options.clip_low), 1.0 + options.clip_high
    ratio_R = inputs.ratio.detach()
    loss_R = -ratio_R.clamp(low, high) * inputs.advantages_R * inputs.logprobs_R
    return TokenLoss(loss_R, ratio_R, ratio_R < low, ratio_R > high)
