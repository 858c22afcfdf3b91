"""GSPO (arXiv:2507.18071): PPO's clip of the sequence's ratio."""

from __future__ import annotations

from megarl.algorithms.interface.token_loss import LOSSES, MAX_LOG_RATIO, TokenInputs, TokenLoss
from megarl.algorithms.losses.ppo import PPOOptions, clipped_surrogate


class GSPOOptions(PPOOptions):
    """The range in which the sequence's ratio has a gradient; the paper uses 3e-4 and 4e-4."""


@LOSSES.register("gspo", title="PPO clip of the sequence's ratio", paper="arXiv:2507.18071")
def gspo(inputs: TokenInputs, options: GSPOOptions) -> TokenLoss:
    """Return the clipped surrogate of s_i = exp(mean of log r over the trained tokens of the sequence) (eq. 7).

    The gradient is that of GSPO-token, sg[s_i] pi_t / sg[pi_t] (eq. 14). If the advantage is constant in a sequence,
    this is the gradient of GSPO itself (section 4.3), which TRL computes with `importance_sampling_level="sequence"`;
    if it is not, each token's gradient carries its own advantage. A sequence must not be split over micro-batches.
    """
    log_ratio_R = inputs.log_ratio
    means_S = inputs.sequence_means(log_ratio_R.detach())
    ratio_R = inputs.of_sequences(means_S.clamp(max=MAX_LOG_RATIO).exp())
    return clipped_surrogate(ratio_R * (1.0 + log_ratio_R - log_ratio_R.detach()), inputs, options)
