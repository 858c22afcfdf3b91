"""Policy losses, with options and papers. Importing this module registers them in `LOSSES`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megarl.algorithms.interface.token_loss import LOSSES, MAX_LOG_RATIO, TokenInputs, TokenLoss
from megarl.common.options import Section

if TYPE_CHECKING:
    from torch import Tensor

# PPO's clipped surrogate (arXiv:1707.06347 eq. 7), also used by GRPO (arXiv:2402.03300 eq. 3); clip-higher (DAPO,
# arXiv:2503.14476 eq. 8), dual clip (arXiv:1912.09729 eq. 5).


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


# GSPO (arXiv:2507.18071): PPO's clip of the sequence's ratio.


class GSPOOptions(PPOOptions):
    """The range in which the sequence's ratio has a gradient; the paper uses 3e-4 and 4e-4."""


@LOSSES.register("gspo", title="PPO clip of the sequence's ratio", paper="arXiv:2507.18071")
def gspo(inputs: TokenInputs, options: GSPOOptions) -> TokenLoss:
    """Return the clipped surrogate of s_i = exp(mean of log r over the trained tokens of the sequence) (eq. 7).

    The gradient is GSPO-token's, sg[s_i] pi_t / sg[pi_t] (eq. 14). With a constant advantage per sequence it is GSPO's
    (section 4.3), as in TRL with `importance_sampling_level="sequence"`; otherwise each token's gradient has the
    token's advantage. Do not split a sequence over micro-batches.
    """
    log_ratio_R = inputs.log_ratio
    means_S = inputs.sequence_means(log_ratio_R.detach())
    ratio_R = inputs.of_sequences(means_S.clamp(max=MAX_LOG_RATIO).exp())
    return clipped_surrogate(ratio_R * (1.0 + log_ratio_R - log_ratio_R.detach()), inputs, options)


# CISPO (MiniMax-M1, arXiv:2506.13585): the importance weight is clipped, but every token keeps its gradient.


class CISPOOptions(Section):
    """The range of the importance weight. The paper only bounds it above; ScaleRL (arXiv:2510.13786) uses 4 to 8."""

    clip_low: float | None = Field(None, ge=0, le=1, description="Weight >= 1 - clip_low; null = no lower bound.")
    clip_high: float = Field(4.0, ge=0, description="Weight <= 1 + clip_high.")


@LOSSES.register("cispo", title="REINFORCE with a clipped importance weight", paper="arXiv:2506.13585")
def cispo(inputs: TokenInputs, options: CISPOOptions) -> TokenLoss:
    """Return -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi of each token."""
    low, high = 1.0 - (1.0 if options.clip_low is None else options.clip_low), 1.0 + options.clip_high
    ratio_R = inputs.ratio.detach()
    loss_R = -ratio_R.clamp(low, high) * inputs.advantages_R * inputs.logprobs_R
    return TokenLoss(loss_R, ratio_R, ratio_R < low, ratio_R > high)


# SAPO (arXiv:2511.20347): a smooth gate in place of PPO's clip.


class SAPOOptions(Section):
    """The temperatures of the gate: the higher, the faster the gradient vanishes as the ratio leaves 1."""

    tau_positive: float = Field(1.0, gt=0, description="Temperature of tokens with a positive advantage.")
    tau_negative: float = Field(1.05, gt=0, description="Temperature of all other tokens.")


@LOSSES.register("sapo", title="a smooth gate of the token's ratio", paper="arXiv:2511.20347")
def sapo(inputs: TokenInputs, options: SAPOOptions) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A of each token, whose gradient at r = 1 is that of -r A."""
    advantages_R = inputs.advantages_R
    tau_R = advantages_R.new_full((), options.tau_positive).where(advantages_R > 0, options.tau_negative)
    ratio_R = inputs.ratio
    return TokenLoss(-(4.0 / tau_R) * (tau_R * (ratio_R - 1.0)).sigmoid() * advantages_R, ratio_R)


# DPPO (arXiv:2602.04879): a trust region by the divergence of the policies, not by the ratio of their probabilities.
#
# A rare token's ratio can leave PPO's range although the distribution has hardly changed; a frequent token's can stay
# inside although it has. DPPO estimates the divergence at each token as if there were two outcomes, this token and any
# other. It stops the gradient where the divergence is too large and the update would increase it.

# Keeps the logarithms finite where a probability is 1; as in verl 0.9.1.
_TINY = 1e-8


class DPPOOptions(Section):
    """The trust region, and the bound of the importance weight (section 5.4 of the paper: a large one)."""

    divergence: Literal["tv", "kl"] = "tv"
    """tv: total variation of the two outcomes, abs(p - q); kl: KL(old || new) of the two outcomes."""
    low: float = Field(0.2, ge=0, description="Largest divergence at which tokens of negative advantage are trained.")
    high: float = Field(0.2, ge=0, description="Largest divergence at which other tokens are trained.")
    cap: float = Field(20.0, ge=1, description="Largest importance weight.")


@LOSSES.register("dppo", title="a trust region by divergence (binary TV or KL)", paper="arXiv:2602.04879")
def dppo(inputs: TokenInputs, options: DPPOOptions) -> TokenLoss:
    """Return -sg[min(r, cap) M] A log pi of each token; M is 0 outside the trust region if A leads further away."""
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
