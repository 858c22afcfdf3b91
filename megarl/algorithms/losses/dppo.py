"""DPPO (arXiv:2602.04879): a trust region by the divergence of the policies, not by the ratio of their probabilities.

A rare token's ratio leaves PPO's range although the distribution has hardly changed, and a frequent token's stays in it
although it has. DPPO estimates the divergence at each token from its probability alone, as if there were two outcomes,
this token and any other, and stops the gradient where it is too large and the update would enlarge it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megarl.algorithms.interface.token_loss import LOSSES, TokenInputs, TokenLoss
from megarl.common.options import Section

if TYPE_CHECKING:
    from torch import Tensor

# Keeps the logarithms finite where a probability is 1; as in verl 0.9.1.
_TINY = 1e-8


class DPPOOptions(Section):
    """The trust region, and the bound of the importance weight (section 5.4 of the paper: a large one)."""

    divergence: Literal["tv", "kl"] = Field(
        "tv", description="tv: the total variation of the two outcomes, abs(p - q); kl: the KL of the old to the new."
    )
    low: float = Field(0.2, ge=0, description="Largest divergence where a token with a negative advantage is trained.")
    high: float = Field(0.2, ge=0, description="Largest divergence where any other token is trained.")
    cap: float = Field(20.0, ge=1, description="Largest importance weight.")


@LOSSES.register("dppo", title="a trust region by divergence (binary TV or KL)", paper="arXiv:2602.04879")
def dppo(inputs: TokenInputs, options: DPPOOptions) -> TokenLoss:
    """Return -sg[min(r, cap) M] A log pi of each token; M is 0 outside of the trust region, where A would lead on."""
    logprobs_R, advantages_R = inputs.logprobs_R.detach(), inputs.advantages_R
    change_R = logprobs_R.exp() - inputs.old_logprobs_R.exp()
    distance_R = change_R.abs() if options.divergence == "tv" else _binary_kl(inputs.old_logprobs_R, logprobs_R)
    positive_R = advantages_R > 0
    high_R = positive_R & (change_R > 0) & (distance_R > options.high)
    low_R = ~positive_R & (change_R < 0) & (distance_R > options.low)
    ratio_R = inputs.ratio.detach()
    weight_R = ratio_R.clamp(max=options.cap).masked_fill(high_R | low_R, 0.0)
    capped_R = (ratio_R > options.cap) & ~(high_R | low_R)
    return TokenLoss(-weight_R * advantages_R * inputs.logprobs_R, ratio_R, low_R, high_R, capped_R)


def _binary_kl(old_R: Tensor, new_R: Tensor) -> Tensor:
    """Return KL(old || new) of the two outcomes "this token" and "another one", [R], from log-probs of the token."""
    old_p_R, new_p_R = old_R.exp(), new_R.exp()
    others_R = ((1.0 - old_p_R + _TINY) / (1.0 - new_p_R + _TINY)).log()
    return old_p_R * (old_R - new_R) + (1.0 - old_p_R) * others_R
