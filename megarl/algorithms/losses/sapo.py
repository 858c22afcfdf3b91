"""SAPO (arXiv:2511.20347): a smooth gate in place of PPO's clip."""

from __future__ import annotations

from pydantic import Field

from megarl.algorithms.interface.token_loss import LOSSES, TokenInputs, TokenLoss
from megarl.common.options import Section


class SAPOOptions(Section):
    """The temperatures of the gate: the higher, the sooner a token loses its gradient as its ratio leaves 1."""

    tau_positive: float = Field(1.0, gt=0, description="Temperature of tokens with a positive advantage.")
    tau_negative: float = Field(1.05, gt=0, description="Temperature of all other tokens.")


@LOSSES.register("sapo", title="a smooth gate of the token's ratio", paper="arXiv:2511.20347")
def sapo(inputs: TokenInputs, options: SAPOOptions) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A of each token, whose gradient at r = 1 is that of -r A."""
    advantages_R = inputs.advantages_R
    tau_R = advantages_R.new_full((), options.tau_positive).where(advantages_R > 0, options.tau_negative)
    ratio_R = inputs.ratio
    return TokenLoss(-(4.0 / tau_R) * (tau_R * (ratio_R - 1.0)).sigmoid() * advantages_R, ratio_R)
