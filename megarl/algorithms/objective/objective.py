"""The training loss: the sum of the terms `rl`, `ce` and `ref_kl`, on packed response tokens.

    rl       coefficient 1: the chosen policy loss, times the weights of a correction, minus the entropy bonus
    ce       the cross-entropy -log pi of given tokens: demonstrations, or a tool's answers
    ref_kl   an estimate of KL(policy || reference), with any stream of log-probs as the reference

A term is the sum of weight * aggregation weight * token loss over its tokens: those whose weight is not 0. The
aggregation weight depends on the number of the term's tokens and sequences in the whole mini-batch, over all ranks and
micro-batches. So neither layout nor packing changes it, and no term depends on another's tokens. Weights multiply a
token's loss but do not change its divisor. The objective is a plain sum of weight * loss, whose weights are fixed
before the first micro-batch.

Weights are data: a row may have them as a stream (`rl_weights`, `ce_weights`, `ref_kl_weights`). By default a row's
trained tokens have 1 in `rl` and `ref_kl`, and all tokens have 0 in `ce`.

Statistics are sums, counts and maxima, never means: they reduce exactly over micro-batches and ranks.

Shapes: R response tokens, S sequences; `cu_seqlens` is int32 [S + 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.correction.apply import CorrectionSpec, importance_weights, proximal_logprobs
from megarl.algorithms.interface.registry import Chosen
from megarl.algorithms.interface.segments import check_packed, segment_sum, sequence_ids
from megarl.algorithms.interface.token_loss import MAX_LOG_RATIO, TokenInputs, TokenLoss
from megarl.algorithms.objective.stats import LossStats

KLEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]
TermName = Literal["rl", "ce", "ref_kl"]
TERMS: tuple[TermName, ...] = ("rl", "ce", "ref_kl")


def weight_stream(term: TermName) -> str:
    """Return the name of the stream of a term's weights."""
    return f"{term}_weights"


WEIGHT_STREAMS = tuple(weight_stream(term) for term in TERMS)


@dataclass(frozen=True)
class GlobalCounts:
    """The counts of one mini-batch over all ranks.

    `tokens`: tokens in the loss. `sequences`: sequences with at least one such token; those masked as a whole
    (truncated, failed) are not counted. `max_tokens`: `sampling.max_tokens`.
    """

    tokens: int
    sequences: int
    max_tokens: int

    @classmethod
    def of(cls, trained_lengths: Iterable[int], max_tokens: int) -> GlobalCounts:
        """Count from the number of trained tokens of each sequence."""
        lengths = [length for length in trained_lengths if length > 0]
        return cls(sum(lengths), len(lengths), max_tokens)


def token_weights(
    mask_R: Tensor,
    cu_seqlens: Tensor,
    aggregation: Aggregation,
    counts: GlobalCounts,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return each token's weight, [R] of `dtype`; 0 where `mask_R` ([R], bool or 0/1) is 0.

    The micro-batch must hold whole sequences. `cu_seqlens`: int32 [S + 1].

    - `token_mean`: 1 / tokens (DAPO, arXiv:2503.14476 eq. 8).
    - `sequence_mean`: 1 / (sequences * own length) (GRPO, arXiv:2402.03300 eq. 3; GSPO).
    - `constant_length`: 1 / (sequences * max_tokens), without any sequence's length (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: the counts are 0 although a token is trained.
    """
    check_packed(cu_seqlens, mask_R)
    mask_R = mask_R.to(dtype)
    if mask_R.numel() == 0:
        return mask_R
    if counts.tokens <= 0 or counts.sequences <= 0:
        if bool(mask_R.any()):
            raise ValueError(f"{counts} although this micro-batch trains {int(mask_R.sum())} tokens")
        return mask_R
    if aggregation == "token_mean":
        return mask_R / counts.tokens
    if aggregation == "sequence_mean":
        ids_R = sequence_ids(cu_seqlens, mask_R.numel())
        lengths_S = segment_sum(mask_R, ids_R, cu_seqlens.numel() - 1)
        return mask_R / (lengths_S.clamp(min=1.0)[ids_R] * counts.sequences)
    return mask_R / (counts.sequences * counts.max_tokens)


@dataclass(frozen=True)
class TermCounts:
    """The tokens and sequences of each term in one mini-batch, over all ranks."""

    rl: GlobalCounts
    ce: GlobalCounts
    ref_kl: GlobalCounts

    @classmethod
    def without_streams(cls, trained: GlobalCounts) -> TermCounts:
        """Return the counts of samples without weights, from the counts of their trained tokens."""
        return cls(rl=trained, ce=GlobalCounts(0, 0, trained.max_tokens), ref_kl=trained)

    @classmethod
    def total(cls, parts: Iterable[TermCounts], max_tokens: int) -> TermCounts:
        """Return the sum of the counts of disjoint parts."""
        known = list(parts)

        def together(name: str) -> GlobalCounts:
            own: list[GlobalCounts] = [getattr(part, name) for part in known]
            return GlobalCounts(sum(each.tokens for each in own), sum(each.sequences for each in own), max_tokens)

        return cls(**{field.name: together(field.name) for field in fields(cls)})

    @property
    def empty(self) -> bool:
        """True if no token is in any term."""
        return not (self.rl.tokens or self.ce.tokens or self.ref_kl.tokens)


def term_mask(term: TermName, mask_R: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
    """Return which tokens are in a term, bool [R]. `mask_R` (bool): the trained tokens.

    `rl` and `ref_kl` cover trained tokens; `ce` covers any response tokens, even a tool's.
    """
    weights_R = streams.get(weight_stream(term))
    if term == "ce":
        return torch.zeros_like(mask_R) if weights_R is None else weights_R != 0
    return mask_R if weights_R is None else mask_R & (weights_R != 0)


def count_terms(sequences: Iterable[tuple[Tensor, Mapping[str, Tensor]]], max_tokens: int) -> TermCounts:
    """Return the counts of sequences, each given by its mask of trained tokens (bool, [R]) and its streams."""
    lengths: dict[str, list[int]] = {term: [] for term in TERMS}
    for mask_R, streams in sequences:
        for term in TERMS:
            lengths[term].append(int(term_mask(term, mask_R, streams).sum()))
    return TermCounts(**{term: GlobalCounts.of(lengths[term], max_tokens) for term in TERMS})


def kl_penalty(logprobs_R: Tensor, ref_logprobs_R: Tensor, estimator: KLEstimator) -> Tensor:
    """Return Schulman's estimate of KL(policy || reference) from the policy's samples, per token, [R], fp32 or fp64.

    With d = log pi_ref - log pi: k1 = -d (unbiased), k2 = d^2 / 2, k3 = exp(d) - d - 1 (unbiased, >= 0;
    joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300 eq. 4). Only `logprobs_R` gets a gradient. In a loss, the
    gradient of k1 has mean zero for any reference: use k1 in the reward.
    """
    dtype = torch.promote_types(logprobs_R.dtype, torch.float32)
    difference_R = ref_logprobs_R.to(dtype).detach() - logprobs_R.to(dtype)
    if estimator == "k1":
        return -difference_R
    if estimator == "k2":
        return 0.5 * difference_R.square()
    bounded_R = difference_R.clamp(max=MAX_LOG_RATIO)
    return bounded_R.exp() - bounded_R - 1.0


def masked_kl(logprobs_R: Tensor, ref_logprobs_R: Tensor, keep_R: Tensor, estimator: KLEstimator) -> Tensor:
    """Return `kl_penalty`, [R], with value and gradient 0 where `keep_R` is False, even for NaN inputs."""
    zero = logprobs_R.new_zeros(())
    # The inputs are masked, not the result: the backward pass of exp at a NaN gives NaN even for a zero gradient.
    return kl_penalty(torch.where(keep_R, logprobs_R, zero), torch.where(keep_R, ref_logprobs_R, zero), estimator)


@dataclass(frozen=True)
class Objective:
    """The loss that a config describes. `reference_stream`: the log-probs of the reference in `ref_kl`."""

    loss: Chosen[TokenInputs, TokenLoss]
    aggregation: Aggregation = "token_mean"
    ce_coef: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    correction: CorrectionSpec | None = None
    reference_stream: str = "reference_logprobs"

    def report(self, stats: LossStats) -> dict[str, float]:
        """Return the numbers to report, from statistics merged over all micro-batches and ranks."""
        return stats.means() | (stats.correction_means() if self.correction else {})


@dataclass(frozen=True)
class LossInputs:
    """The inputs of the loss for one micro-batch: R response tokens of S whole sequences.

    `logprobs_R` (with gradient) and `entropy_R` are the policy's, fp32; `mask_R` (bool) marks the trained tokens.
    `streams`: all other values per token, [R] each, by name (`old_logprobs`, `advantages`, `ce_weights`, ...).
    `counts`: those of the whole mini-batch over all ranks.
    """

    logprobs_R: Tensor
    mask_R: Tensor
    cu_seqlens: Tensor  # int32 [S + 1]
    counts: TermCounts
    streams: Mapping[str, Tensor]
    entropy_R: Tensor | None = None


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of the objective: `loss` (0-dim, with gradient). Shares add up to the objective."""

    loss: Tensor
    stats: LossStats


LossFunction = Callable[[LossInputs], MicroBatchLoss]


def micro_batch_loss(objective: Objective, inputs: LossInputs) -> MicroBatchLoss:
    """Return this micro-batch's share of rl - entropy_coef * entropy + kl_coef * ref_kl + ce_coef * ce.

    The entropy has the weights of `rl`, without a correction's. KL, entropy and cross-entropy are reported whenever
    their inputs are given. Raises ValueError if required reference log-probs or `entropy_R` are missing.
    """
    rl = _tokens_of("rl", objective, inputs)
    policy_R, stats = policy_losses(objective, inputs, rl.keep_R)
    loss = (rl.weights_R * policy_R).sum()
    stats.sums["policy_loss"] = loss.detach().double()
    if (kl := _ref_kl(objective, inputs, stats)) is not None:
        loss = loss + objective.kl_coef * kl
    if (entropy := _entropy(objective, inputs, rl, stats)) is not None:
        loss = loss - objective.entropy_coef * entropy
    if (ce := _cross_entropy(objective, inputs, stats)) is not None:
        loss = loss + objective.ce_coef * ce
    stats.sums["loss"] = loss.detach().double()
    return MicroBatchLoss(loss, stats)


@dataclass(frozen=True)
class _TermTokens:
    """A term's tokens, `keep_R` (bool, [R]), and the weights of their losses, `weights_R` ([R])."""

    keep_R: Tensor
    weights_R: Tensor


def _tokens_of(term: TermName, objective: Objective, inputs: LossInputs) -> _TermTokens:
    keep_R = term_mask(term, inputs.mask_R.bool(), inputs.streams)
    dtype = torch.promote_types(inputs.logprobs_R.dtype, torch.float32)
    weights_R = token_weights(keep_R, inputs.cu_seqlens, objective.aggregation, getattr(inputs.counts, term), dtype)
    own_R = inputs.streams.get(weight_stream(term))
    if own_R is not None:
        weights_R = weights_R * torch.where(keep_R, own_R.to(dtype), weights_R.new_zeros(()))
    return _TermTokens(keep_R, weights_R)


def policy_losses(objective: Objective, inputs: LossInputs, keep_R: Tensor) -> tuple[Tensor, LossStats]:
    """Return the policy loss of each token, [R], 0 where `keep_R` (bool, [R]) is False, and its statistics.

    A correction needs the stream `rollout_logprobs`; `old_logprobs` are then the proximal policy's. Without them the
    proximal policy is the current one, as in a step's first update: the ratio is 1, and the gradient is REINFORCE's
    times the weight.
    """
    logprobs_R, streams, cu_seqlens = inputs.logprobs_R, inputs.streams, inputs.cu_seqlens
    correction = objective.correction
    old_R = streams["old_logprobs"] if correction is None else proximal_logprobs(correction, logprobs_R, streams)
    given = TokenInputs.of(logprobs_R, old_R, streams["advantages"], keep_R, cu_seqlens)
    result = objective.loss(given)
    loss_R = torch.where(keep_R, result.loss_R, result.loss_R.new_zeros(()))
    stats = _statistics(given, result)
    if correction is None:
        return loss_R, stats
    rollout_R = streams["rollout_logprobs"]
    check_packed(cu_seqlens, old_R, rollout_R)
    weights = importance_weights(old_R, rollout_R, keep_R, correction, cu_seqlens=cu_seqlens)
    stats.add_correction(weights, LossStats.of_pair(rollout_R, old_R, keep_R, cu_seqlens))
    return loss_R * weights.weights_R, stats


@torch.no_grad()
def _statistics(given: TokenInputs, result: TokenLoss) -> LossStats:
    ratio_R = given.ratio if result.ratio_R is None else result.ratio_R
    stats = LossStats.of_ratios(ratio_R.detach(), given.log_ratio.detach(), given.keep_R, given.cu_seqlens)
    stats.add_moments(given.old_logprobs_R.double(), given.logprobs_R.detach().double())
    for name, bounded_R in (("clip_low", result.low_R), ("clip_high", result.high_R), ("clip_dual", result.dual_R)):
        if bounded_R is not None:
            stats.sums[name] = (given.keep_R & bounded_R).sum(dtype=torch.float64)
    return stats


def _ref_kl(objective: Objective, inputs: LossInputs, stats: LossStats) -> Tensor | None:
    reference_R = inputs.streams.get(objective.reference_stream)
    if reference_R is None:
        if objective.kl_coef:
            raise ValueError(f"kl_coef is not 0, but no reference log-probs ({objective.reference_stream}) were given")
        return None
    check_packed(inputs.cu_seqlens, inputs.mask_R, reference_R)
    term = _tokens_of("ref_kl", objective, inputs)
    kl_R = masked_kl(inputs.logprobs_R, reference_R, term.keep_R, objective.kl_estimator)
    stats.sums["kl_ref"] = kl_R.detach().sum(dtype=torch.float64)
    stats.sums["ref_kl_tokens"] = term.keep_R.sum(dtype=torch.float64)
    if not objective.kl_coef:
        return None
    share = (term.weights_R * kl_R).sum()
    stats.sums["ref_kl_loss"] = share.detach().double()
    return share


def _entropy(objective: Objective, inputs: LossInputs, rl: _TermTokens, stats: LossStats) -> Tensor | None:
    if inputs.entropy_R is None:
        if objective.entropy_coef:
            raise ValueError("entropy_coef is not 0, but no entropy was given")
        return None
    check_packed(inputs.cu_seqlens, inputs.mask_R, inputs.entropy_R)
    zero = rl.weights_R.new_zeros(())
    entropy_R = torch.where(rl.keep_R, inputs.entropy_R.to(zero.dtype), zero)
    stats.sums["entropy"] = entropy_R.detach().sum(dtype=torch.float64)
    return (rl.weights_R * entropy_R).sum() if objective.entropy_coef else None


def _cross_entropy(objective: Objective, inputs: LossInputs, stats: LossStats) -> Tensor | None:
    if weight_stream("ce") not in inputs.streams:
        return None
    term = _tokens_of("ce", objective, inputs)
    zero = term.weights_R.new_zeros(())
    entropies_R = -torch.where(term.keep_R, inputs.logprobs_R.to(zero.dtype), zero)
    share = (term.weights_R * entropies_R).sum()
    stats.sums["ce"] = entropies_R.detach().sum(dtype=torch.float64)
    stats.sums["ce_tokens"] = term.keep_R.sum(dtype=torch.float64)
    stats.sums["ce_loss"] = share.detach().double()
    return share if objective.ce_coef else None
