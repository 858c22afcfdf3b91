"""Log-ratios of the proximal to the sampling policy on packed tokens, and sums, means and maxima per sequence.

Shapes: R response tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.interface.segments import check_packed, segment_sum, sequence_ids

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
