"""Masks of tokens and sequences on which two policies are too far apart: pure functions, by name.

p is the probability of a sampled token under the proximal policy, q under the sampling policy, d = log p - log q.

- `token`, `sequence`, `geometric`: bounds on p / q of the token (IcePop, arXiv:2510.18855), its product over the
  sequence (richardli.xyz/rl-collapse), or its geometric mean (GSPO's ratio, arXiv:2507.18071).
- `{token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}`: bounds on an estimate of KL(q || p) from tokens of q
  (joschu.net/blog/kl-approx.html), of the token, or its sum, mean or maximum over the sequence's trained tokens:
  k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. Names and bounds are verl's (0.9.1, rollout_corr_helper.py): k1 bounds
  exp(k1) = q / p, so its [0.5, 3] is [1/3, 2] for p / q. AReaL's `kl_k1` and `kl_k3` have the opposite sign of d.

Token log-ratios are first clamped to +-20, as in verl.

Shapes: R response tokens, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megarl.algorithms.correction.config import MaskConfig, MaskKind
from megarl.algorithms.interface.segments import check_packed, segment_sum, sequence_ids

# Log-ratios of the proximal to the sampling policy on packed tokens, and sums, means and maxima per sequence.
#
# Shapes: R response tokens, S sequences.

# As in verl; exp(20) = 5e8 is finite in fp32 and above any useful cap, exp(-20) = 2e-9 keeps a weight positive.
MAX_LOG_WEIGHT = 20.0


@dataclass(frozen=True)
class TrainedTokens:
    """The trained tokens, with sums per sequence. `keep_R`: [R] bool; `ids_R`: int64, each token's sequence."""

    keep_R: Tensor
    ids_R: Tensor
    sequences: int

    @classmethod
    def of(cls, keep_R: Tensor, cu_seqlens: Tensor) -> TrainedTokens:
        """Return the trained tokens of packed whole sequences; `cu_seqlens`: int32 [S + 1]."""
        check_packed(cu_seqlens, keep_R)
        return TrainedTokens(keep_R, sequence_ids(cu_seqlens, keep_R.numel()), cu_seqlens.numel() - 1)

    @property
    def lengths(self) -> Tensor:
        """The number of trained tokens of each sequence, int64 [S]."""
        return self.counts(self.keep_R)

    def counts(self, marked_R: Tensor) -> Tensor:
        """Return the number of marked (bool) tokens of each sequence, int64 [S]."""
        return segment_sum(marked_R.long(), self.ids_R, self.sequences)

    def sums(self, values_R: Tensor) -> Tensor:
        """Return the sum of `values_R` over each sequence's trained tokens, [S]."""
        return segment_sum(torch.where(self.keep_R, values_R, values_R.new_zeros(())), self.ids_R, self.sequences)

    def means(self, values_R: Tensor) -> Tensor:
        """Return the mean of `values_R` over each sequence's trained tokens, [S]; 0 if it has none."""
        return self.sums(values_R) / self.lengths.clamp(min=1).to(values_R.dtype)

    def maxima(self, values_R: Tensor) -> Tensor:
        """Return the maximum of `values_R` (>= 0) over each sequence's trained tokens, [S]; 0 if none."""
        kept_R = torch.where(self.keep_R, values_R, values_R.new_zeros(()))
        return values_R.new_zeros(self.sequences).scatter_reduce(0, self.ids_R, kept_R, reduce="amax")


@dataclass(frozen=True)
class LogRatios(TrainedTokens):
    """`values_R`: log p - log q, [R], detached, at least fp32, 0 where not trained.

    p is the probability of a sampled token under the proximal policy, q under the sampling policy.
    """

    values_R: Tensor

    @classmethod
    def between(cls, proximal_R: Tensor, sampling_R: Tensor, keep_R: Tensor, cu_seqlens: Tensor) -> LogRatios:
        """Return the log-ratios of log-probs at the sampling temperature, [R] each; `cu_seqlens`: int32 [S + 1].

        Values where `keep_R` is False, even NaN, are ignored.
        """
        check_packed(cu_seqlens, proximal_R, sampling_R, keep_R)
        tokens = TrainedTokens.of(keep_R, cu_seqlens)
        dtype = torch.promote_types(proximal_R.dtype, torch.float32)
        difference_R = proximal_R.detach().to(dtype) - sampling_R.detach().to(dtype)
        zero = torch.zeros((), dtype=dtype, device=proximal_R.device)
        return cls(tokens.keep_R, tokens.ids_R, tokens.sequences, torch.where(keep_R, difference_R, zero))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of a log-ratio clamped to +-MAX_LOG_WEIGHT."""
    return log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "ratio": lambda d_R: d_R,
    "k1": lambda d_R: -d_R,
    "k2": lambda d_R: 0.5 * d_R.square(),
    "k3": lambda d_R: d_R.exp() - 1.0 - d_R,
}
_OVER_SEQUENCE: dict[str, Callable[[LogRatios, Tensor], Tensor]] = {
    "seq_sum": LogRatios.sums,
    "seq_mean": LogRatios.means,
    "seq_max": LogRatios.maxima,
}


@dataclass(frozen=True)
class Mask:
    """A mask. `level`: `token`, or how the tokens of a sequence are combined.

    `estimate`: ratio, k1, k2 or k3. The first two bound a ratio, whose logarithm is compared.
    """

    level: str
    estimate: str

    @property
    def bounds_a_ratio(self) -> bool:
        """True if the option's bounds are ratios."""
        return self.estimate in ("ratio", "k1")

    def statistic(self, ratios: LogRatios) -> Tensor:
        """Return the quantity that is compared with the bounds, per token, in nats, [R]; 0 where not trained."""
        each_R = _ESTIMATES[self.estimate](ratios.values_R.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))
        if self.level != "token":
            each_R = _OVER_SEQUENCE[self.level](ratios, each_R)[ratios.ids_R]
        return torch.where(ratios.keep_R, each_R, each_R.new_zeros(()))


def _of(kind: MaskKind) -> Mask:
    if kind == "token":
        return Mask("token", "ratio")
    if kind == "sequence":
        return Mask("seq_sum", "ratio")
    if kind == "geometric":
        return Mask("seq_mean", "ratio")
    level, _, estimate = kind.rpartition("_")
    return Mask(level, estimate)


MASKS: dict[MaskKind, Mask] = {kind: _of(kind) for kind in get_args(MaskKind)}


@dataclass(frozen=True)
class Rejection:
    """The effect of one mask. `rejected_R`: [R] bool, trained tokens that it excludes.

    `largest`: 0-dim, the largest |statistic| in nats; 0 if no token is trained.
    """

    kind: MaskKind
    rejected_R: Tensor
    largest: Tensor


def reject(ratios: LogRatios, option: MaskConfig) -> Rejection:
    """Return which trained tokens the mask excludes: those whose statistic is outside [low, high]."""
    mask = MASKS[option.kind]
    low, high = option.bounds
    if mask.bounds_a_ratio:
        low, high = math.log(low), math.log(high)
    statistic_R = mask.statistic(ratios)
    rejected_R = ratios.keep_R & ((statistic_R < low) | (statistic_R > high))
    largest = statistic_R.abs().max() if statistic_R.numel() else statistic_R.new_zeros(())
    return Rejection(option.kind, rejected_R, largest)
