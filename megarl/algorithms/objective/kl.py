"""Estimates of the KL divergence from samples of the policy.

Shapes: R response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.interface.token_loss import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3"]


def kl_penalty(logprobs_R: Tensor, ref_logprobs_R: Tensor, estimator: KLEstimator) -> Tensor:
    """Return Schulman's estimate of KL(policy || reference) from the policy's samples, per token, [R], fp32 or fp64.

    With d = log pi_ref - log pi: k1 = -d (unbiased), k2 = d^2 / 2, k3 = exp(d) - d - 1 (unbiased, >= 0;
    joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300 eq. 4). The gradient flows through `logprobs_R` only. In a
    loss, the gradient of k1 has mean zero for any reference: use k1 in the reward.

    Raises:
        ValueError: the estimator is unknown.
    """
    dtype = torch.promote_types(logprobs_R.dtype, torch.float32)
    difference_R = ref_logprobs_R.to(dtype).detach() - logprobs_R.to(dtype)
    if estimator == "k1":
        return -difference_R
    if estimator == "k2":
        return 0.5 * difference_R.square()
    if estimator == "k3":
        bounded_R = difference_R.clamp(max=MAX_LOG_RATIO)
        return bounded_R.exp() - bounded_R - 1.0
    raise ValueError(f"unknown KL estimator {estimator!r}; use k1, k2 or k3")


def masked_kl(logprobs_R: Tensor, ref_logprobs_R: Tensor, keep_R: Tensor, estimator: KLEstimator) -> Tensor:
    """Return `kl_penalty`, [R], with value and gradient 0 where `keep_R` is False, even if the inputs are NaN there."""
    zero = logprobs_R.new_zeros(())
    # The inputs are masked, not the result: the backward pass of exp at a NaN gives NaN even for a zero gradient.
    return kl_penalty(torch.where(keep_R, logprobs_R, zero), torch.where(keep_R, ref_logprobs_R, zero), estimator)
