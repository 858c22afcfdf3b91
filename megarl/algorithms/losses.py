"""Policy losses on packed response tokens (see `segments`): PPO/GRPO clip, GSPO, KL to the reference.

Everything is per token; `aggregation.token_weights` turns it into one number. Statistics are sums, counts
and maxima, never means, so that they reduce exactly over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.aggregation import Aggregation, GlobalCounts, token_weights
from megarl.algorithms.segments import check_packed, segment_sum, sequence_ids
from megarl.algorithms.stats import LossStats

LossKind = Literal["ppo", "gspo"]
KLEstimator = Literal["k1", "k2", "k3"]

# exp(20) = 5e8: far outside any useful ratio, and still finite in fp32. No gradient flows beyond it.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossSpec:
    """The knobs of the loss, as in the configuration section `algorithm`."""

    clip_low: float
    clip_high: float
    kind: LossKind = "ppo"
    clip_dual: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token_mean"


@dataclass(frozen=True)
class TokenLoss:
    """`loss_T`: loss per token with gradient, 0 where masked. `stats`: detached sums and maxima."""

    loss_T: Tensor
    stats: LossStats


@dataclass(frozen=True)
class MicroBatchLoss:
    """`loss`: this micro-batch's share of the objective (0-dim, with gradient); the shares add up."""

    loss: Tensor
    stats: LossStats


def importance_ratio(log_ratio_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, kind: LossKind) -> Tensor:
    """Importance ratio new/old of each token, [T].

    `ppo`: exp(log_ratio) of the token. `gspo`: the sequence's geometric mean, s_i = exp(mean of log_ratio
    over its trained tokens) (arXiv:2507.18071 eq. 7), with GSPO-token's gradient, sg[s_i] * pi_t /
    sg[pi_t] (eq. 14 there): where the advantage is constant in a sequence that is GSPO's own gradient
    (section 4.3 there), which TRL's `importance_sampling_level="sequence"` computes, and where it is not,
    each token keeps its own. A sequence must not be split over micro-batches.
    """
    if kind == "ppo":
        return log_ratio_T.clamp(max=MAX_LOG_RATIO).exp()
    if kind != "gspo":
        raise ValueError(f"unknown loss {kind!r}; use ppo or gspo")
    ids_T = sequence_ids(cu_seqlens, log_ratio_T.numel())
    sequences = cu_seqlens.numel() - 1
    weight_T = mask_T.to(log_ratio_T.dtype)
    length_S = segment_sum(weight_T, ids_T, sequences).clamp(min=1.0)
    mean_S = segment_sum(log_ratio_T.detach() * weight_T, ids_T, sequences) / length_S
    value_T = mean_S.clamp(max=MAX_LOG_RATIO).exp()[ids_T]
    return value_T * (1.0 + log_ratio_T - log_ratio_T.detach())


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
    kind: LossKind = "ppo",
) -> TokenLoss:
    """Clipped surrogate -min(r A, clip(r, 1-low, 1+high) A) per token (PPO, arXiv:1707.06347 eq. 7).

    Separate bounds are DAPO's clip-higher (arXiv:2503.14476). `clip_dual` c > 1 bounds the objective from
    below by c A where A < 0 (dual-clip PPO, arXiv:1912.09729 eq. 5). All tensors are [T]; log-probs are of
    the sampled tokens, at the sampling temperature; `mask_T` is bool or 0/1. Computed in fp32 (fp64 stays
    fp64); whatever stands in masked positions, NaN included, reaches neither value nor gradient.
    """
    check_packed(cu_seqlens, logprobs_T, old_logprobs_T, advantages_T, mask_T)
    keep_T = mask_T.bool()
    dtype = torch.promote_types(logprobs_T.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=logprobs_T.device)
    difference_T = logprobs_T.to(dtype) - old_logprobs_T.to(dtype).detach()
    log_ratio_T = torch.where(keep_T, difference_T, zero)
    advantages_T = torch.where(keep_T, advantages_T.to(dtype).detach(), zero)
    ratio_T = importance_ratio(log_ratio_T, keep_T, cu_seqlens, kind)
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    negative_T = keep_T & (advantages_T < 0)
    dual_T = torch.zeros_like(keep_T)
    if clip_dual is not None:
        bound_T = -clip_dual * advantages_T
        dual_T = negative_T & (loss_T.detach() > bound_T)
        loss_T = torch.where(negative_T, torch.minimum(loss_T, bound_T), loss_T)
    loss_T = torch.where(keep_T, loss_T, zero)
    with torch.no_grad():
        stats = LossStats.of_ratios(ratio_T.detach(), log_ratio_T.detach(), keep_T, cu_seqlens)
        stats.add_moments(
            torch.where(keep_T, old_logprobs_T.double(), 0.0), torch.where(keep_T, logprobs_T.double(), 0.0)
        )
        stats.sums["clip_low"] = (negative_T & (ratio_T < 1.0 - clip_low)).sum(dtype=torch.float64)
        positive_T = keep_T & (advantages_T > 0)
        stats.sums["clip_high"] = (positive_T & (ratio_T > 1.0 + clip_high)).sum(dtype=torch.float64)
        stats.sums["clip_dual"] = dual_T.sum(dtype=torch.float64)
    return TokenLoss(loss_T, stats)


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator) -> Tensor:
    """Schulman's estimators of KL(policy || reference) from the policy's samples, per token, [T], fp32 or
    fp64.

    With d = log pi_ref - log pi: k1 = -d (unbiased), k2 = d^2 / 2, k3 = exp(d) - d - 1 (unbiased, >= 0;
    joschu.net/blog/kl-approx.html; GRPO eq. 4). Gradient flows through `logprobs_T` only. In a loss, k1's
    gradient has zero mean whatever the reference is: use it in the reward.
    """
    dtype = torch.promote_types(logprobs_T.dtype, torch.float32)
    difference_T = ref_logprobs_T.to(dtype).detach() - logprobs_T.to(dtype)
    if estimator == "k1":
        return -difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    if estimator == "k3":
        bounded_T = difference_T.clamp(max=MAX_LOG_RATIO)
        return bounded_T.exp() - bounded_T - 1.0
    raise ValueError(f"unknown KL estimator {estimator!r}; use k1, k2 or k3")


def masked_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor, keep_T: Tensor, estimator: KLEstimator) -> Tensor:
    """`kl_penalty`, 0 in value and gradient where `keep_T` is False, whatever stands there."""
    zero = logprobs_T.new_zeros(())
    # Masked before the estimator: exp's backward of a NaN is NaN even under a zero gradient.
    return kl_penalty(torch.where(keep_T, logprobs_T, zero), torch.where(keep_T, ref_logprobs_T, zero), estimator)


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one micro-batch: R response tokens of S whole sequences. All tensors are [R] but the cuts.

    `logprobs_R` (with gradient) and `entropy_R` are the policy's, fp32; `mask_R` (bool) marks the trained tokens.
    `streams`: everything else per token, by name (`old_logprobs`, `advantages`, ...). `counts`: of the whole
    mini-batch over all ranks.
    """

    logprobs_R: Tensor
    mask_R: Tensor
    cu_seqlens: Tensor  # int32 [S + 1]
    counts: GlobalCounts
    streams: Mapping[str, Tensor]
    entropy_R: Tensor | None = None


# A loss gives a micro-batch's share of the objective; the shares of all micro-batches and ranks add up.
LossFunction = Callable[[LossInputs], MicroBatchLoss]


def micro_batch_loss(spec: LossSpec, inputs: LossInputs) -> MicroBatchLoss:
    """This micro-batch's share of: policy loss + kl_coef * KL(ref) - entropy_coef * entropy, by `counts`.

    All three terms carry the same token weights. Stream `reference_logprobs` is needed if `kl_coef` is not 0 and
    reported if given; likewise `entropy_R` for `entropy_coef`. Raises ValueError if a needed one is missing.
    """
    logprobs_R, mask_R, cu_seqlens, streams = inputs.logprobs_R, inputs.mask_R, inputs.cu_seqlens, inputs.streams
    policy = policy_loss(
        logprobs_R,
        streams["old_logprobs"],
        streams["advantages"],
        mask_R,
        cu_seqlens=cu_seqlens,
        clip_low=spec.clip_low,
        clip_high=spec.clip_high,
        clip_dual=spec.clip_dual,
        kind=spec.kind,
    )
    weights_R = token_weights(mask_R, cu_seqlens, spec.aggregation, inputs.counts, policy.loss_T.dtype)
    keep_R = mask_R.bool()
    stats = policy.stats
    loss = (weights_R * policy.loss_T).sum()
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
        entropy_R = torch.where(keep_R, inputs.entropy_R.to(policy.loss_T.dtype), policy.loss_T.new_zeros(()))
        stats.sums["entropy"] = entropy_R.detach().sum(dtype=torch.float64)
        if spec.entropy_coef:
            loss = loss - spec.entropy_coef * (weights_R * entropy_R).sum()
    elif spec.entropy_coef:
        raise ValueError("entropy_coef is not 0, but no entropy was given")
    stats.sums["loss"] = loss.detach().double()
    return MicroBatchLoss(loss, stats)
