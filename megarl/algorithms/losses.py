"""Policy losses on packed response tokens (see `segments`): PPO/GRPO clip, GSPO, KL to the reference.

All losses are per token; `aggregation.token_weights` turns them into one number. Statistics are sums, counts and
maxima, never means, so that they reduce exactly over micro-batches and ranks.

Shapes: R response tokens, S sequences; `cu_seqlens` is int32 [S + 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.aggregation import Aggregation, GlobalCounts, token_weights
from megarl.algorithms.correction import CorrectionSpec, importance_weights
from megarl.algorithms.segments import check_packed, segment_sum, sequence_ids
from megarl.algorithms.stats import LossStats

LossKind = Literal["ppo", "gspo"]
KLEstimator = Literal["k1", "k2", "k3"]

# exp(20) = 5e8 is far outside any useful ratio, and finite in fp32. No gradient flows beyond this bound.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossSpec:
    """The options of the loss, as in the configuration section `algorithm`. `correction`: None for none."""

    clip_low: float
    clip_high: float
    kind: LossKind
    clip_dual: float | None
    kl_coef: float
    kl_estimator: KLEstimator
    entropy_coef: float
    aggregation: Aggregation
    correction: CorrectionSpec | None = None


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token. `loss_R`: [R] with gradient, 0 where masked. `stats`: detached sums and maxima."""

    loss_R: Tensor
    stats: LossStats


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of the objective, `loss` (0-dim, with gradient). The shares add up to the objective."""

    loss: Tensor
    stats: LossStats


def importance_ratio(log_ratio_R: Tensor, mask_R: Tensor, cu_seqlens: Tensor, kind: LossKind) -> Tensor:
    """Return the importance ratio new/old of each token, [R].

    `log_ratio_R`: new minus old log-prob. `mask_R`: trained tokens, bool or 0/1.

    - `ppo`: exp(log_ratio) of the token.
    - `gspo`: the sequence's geometric mean, s_i = exp(mean of log_ratio over its trained tokens) (arXiv:2507.18071
      eq. 7), with the gradient of GSPO-token, sg[s_i] * pi_t / sg[pi_t] (eq. 14 there). If the advantage is constant
      in a sequence, this is the gradient of GSPO itself (section 4.3 there), which TRL computes with
      `importance_sampling_level="sequence"`; if it is not, each token's gradient carries its own advantage. A sequence
      must not be split over micro-batches.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind == "ppo":
        return log_ratio_R.clamp(max=MAX_LOG_RATIO).exp()
    if kind != "gspo":
        raise ValueError(f"unknown loss {kind!r}; use ppo or gspo")
    ids_R = sequence_ids(cu_seqlens, log_ratio_R.numel())
    sequences = cu_seqlens.numel() - 1
    weight_R = mask_R.to(log_ratio_R.dtype)
    length_S = segment_sum(weight_R, ids_R, sequences).clamp(min=1.0)
    mean_S = segment_sum(log_ratio_R.detach() * weight_R, ids_R, sequences) / length_S
    value_R = mean_S.clamp(max=MAX_LOG_RATIO).exp()[ids_R]
    return value_R * (1.0 + log_ratio_R - log_ratio_R.detach())


def policy_loss(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    mask_R: Tensor,
    *,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
    kind: LossKind,
) -> TokenLoss:
    """Return the clipped surrogate -min(r A, clip(r, 1-low, 1+high) A) per token (PPO, arXiv:1707.06347 eq. 7).

    Separate bounds are DAPO's clip-higher (arXiv:2503.14476). `clip_dual` c > 1 bounds the objective from below by c A
    where A < 0 (dual-clip PPO, arXiv:1912.09729 eq. 5); None turns it off. All tensors are [R] but `cu_seqlens`. The
    log-probs are those of the sampled tokens, at the sampling temperature; `mask_R` is bool or 0/1. The computation is
    in fp32 (fp64 for fp64 inputs). Values at masked positions, NaN included, reach neither value nor gradient.
    """
    check_packed(cu_seqlens, logprobs_R, old_logprobs_R, advantages_R, mask_R)
    keep_R = mask_R.bool()
    dtype = torch.promote_types(logprobs_R.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=logprobs_R.device)
    difference_R = logprobs_R.to(dtype) - old_logprobs_R.to(dtype).detach()
    log_ratio_R = torch.where(keep_R, difference_R, zero)
    advantages_R = torch.where(keep_R, advantages_R.to(dtype).detach(), zero)
    ratio_R = importance_ratio(log_ratio_R, keep_R, cu_seqlens, kind)
    clipped_R = ratio_R.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_R = -torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R)
    negative_R = keep_R & (advantages_R < 0)
    dual_R = torch.zeros_like(keep_R)
    if clip_dual is not None:
        bound_R = -clip_dual * advantages_R
        dual_R = negative_R & (loss_R.detach() > bound_R)
        loss_R = torch.where(negative_R, torch.minimum(loss_R, bound_R), loss_R)
    loss_R = torch.where(keep_R, loss_R, zero)
    with torch.no_grad():
        stats = LossStats.of_ratios(ratio_R.detach(), log_ratio_R.detach(), keep_R, cu_seqlens)
        stats.add_moments(
            torch.where(keep_R, old_logprobs_R.double(), 0.0), torch.where(keep_R, logprobs_R.double(), 0.0)
        )
        stats.sums["clip_low"] = (negative_R & (ratio_R < 1.0 - clip_low)).sum(dtype=torch.float64)
        positive_R = keep_R & (advantages_R > 0)
        stats.sums["clip_high"] = (positive_R & (ratio_R > 1.0 + clip_high)).sum(dtype=torch.float64)
        stats.sums["clip_dual"] = dual_R.sum(dtype=torch.float64)
    return TokenLoss(loss_R, stats)


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


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss for one micro-batch: R response tokens of S whole sequences.

    `logprobs_R` (with gradient) and `entropy_R` are the policy's, fp32; `mask_R` (bool) marks the trained tokens.
    `streams`: all other values per token, [R] each, by name (`old_logprobs`, `advantages`, ...). `counts`: those of the
    whole mini-batch over all ranks.
    """

    logprobs_R: Tensor
    mask_R: Tensor
    cu_seqlens: Tensor  # int32 [S + 1]
    counts: GlobalCounts
    streams: Mapping[str, Tensor]
    entropy_R: Tensor | None = None


# Returns a micro-batch's share of the objective; the shares of all micro-batches and ranks add up to it.
LossFunction = Callable[[LossInputs], MicroBatchLoss]


def corrected_policy_loss(spec: LossSpec, inputs: LossInputs) -> TokenLoss:
    """Return `policy_loss` of each token, multiplied by its weight if the spec has a correction.

    With a correction the stream `rollout_logprobs` is required, and `old_logprobs` are the proximal policy's. Without
    `old_logprobs` the proximal policy is the current one, as in the first update of a step: the ratio is 1, and the
    gradient is that of REINFORCE times the weight.
    """
    logprobs_R, streams = inputs.logprobs_R, inputs.streams
    old_R = streams["old_logprobs"] if spec.correction is None else streams.get("old_logprobs", logprobs_R.detach())
    result = policy_loss(
        logprobs_R,
        old_R,
        streams["advantages"],
        inputs.mask_R,
        cu_seqlens=inputs.cu_seqlens,
        clip_low=spec.clip_low,
        clip_high=spec.clip_high,
        clip_dual=spec.clip_dual,
        kind=spec.kind,
    )
    if spec.correction is None:
        return result
    keep_R, rollout_R = inputs.mask_R.bool(), streams["rollout_logprobs"]
    check_packed(inputs.cu_seqlens, old_R, rollout_R)
    weights = importance_weights(old_R, rollout_R, keep_R, spec.correction)
    result.stats.add_correction(weights, LossStats.of_pair(rollout_R, old_R, keep_R, inputs.cu_seqlens))
    return TokenLoss(result.loss_R * weights.weights_R, result.stats)


def micro_batch_loss(spec: LossSpec, inputs: LossInputs) -> MicroBatchLoss:
    """Return this micro-batch's share of policy loss + kl_coef * KL(ref) - entropy_coef * entropy.

    All three terms have the same token weights, which follow from `inputs.counts`; the weights of a correction are
    those of the policy loss only. The stream `reference_logprobs` is required if `kl_coef` is not 0, and its KL is
    reported whenever it is given; the same holds for `entropy_R` and `entropy_coef`.

    Raises:
        ValueError: `reference_logprobs` or `entropy_R` is required but missing.
    """
    logprobs_R, mask_R, cu_seqlens, streams = inputs.logprobs_R, inputs.mask_R, inputs.cu_seqlens, inputs.streams
    policy = corrected_policy_loss(spec, inputs)
    weights_R = token_weights(mask_R, cu_seqlens, spec.aggregation, inputs.counts, policy.loss_R.dtype)
    keep_R = mask_R.bool()
    stats = policy.stats
    loss = (weights_R * policy.loss_R).sum()
    stats.sums["policy_loss"] = loss.detach().double()
    reference_R = streams.get("reference_logprobs")
    if reference_R is not None:
        check_packed(cu_seqlens, mask_R, reference_R)
        kl_R = masked_kl(logprobs_R, reference_R, keep_R, spec.kl_estimator)
        stats.sums["kl_ref"] = kl_R.detach().sum(dtype=torch.float64)
        if spec.kl_coef:
            loss = loss + spec.kl_coef * (weights_R * kl_R).sum()
    elif spec.kl_coef:
        raise ValueError("kl_coef is not 0, but no reference log-probs were given")
    if inputs.entropy_R is not None:
        check_packed(cu_seqlens, mask_R, inputs.entropy_R)
        entropy_R = torch.where(keep_R, inputs.entropy_R.to(policy.loss_R.dtype), policy.loss_R.new_zeros(()))
        stats.sums["entropy"] = entropy_R.detach().sum(dtype=torch.float64)
        if spec.entropy_coef:
            loss = loss - spec.entropy_coef * (weights_R * entropy_R).sum()
    elif spec.entropy_coef:
        raise ValueError("entropy_coef is not 0, but no entropy was given")
    stats.sums["loss"] = loss.detach().double()
    return MicroBatchLoss(loss, stats)
