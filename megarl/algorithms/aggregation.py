"""From token losses to one number, by global counts.

A weight per token is fixed before the first micro-batch, from counts of the whole mini-batch over all
ranks. The objective is then a plain sum of weight * loss, so no split into micro-batches or ranks can
change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.segments import check_packed, segment_sum, sequence_ids

Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of one mini-batch over all ranks.

    `tokens`: tokens in the loss. `sequences`: sequences with at least one such token; a sequence masked as a
    whole (truncated, failed) counts as if it were not in the batch. `max_tokens`: `sampling.max_tokens`.
    """

    tokens: int
    sequences: int
    max_tokens: int

    @classmethod
    def of(cls, trained_lengths: Iterable[int], max_tokens: int) -> GlobalCounts:
        """Counts from the number of trained tokens of each sequence."""
        lengths = [length for length in trained_lengths if length > 0]
        return cls(sum(lengths), len(lengths), max_tokens)

    def __add__(self, other: GlobalCounts) -> GlobalCounts:
        if self.max_tokens != other.max_tokens:
            raise ValueError(f"counts of different max_tokens: {self.max_tokens} and {other.max_tokens}")
        return GlobalCounts(self.tokens + other.tokens, self.sequences + other.sequences, self.max_tokens)


def token_weights(
    mask_T: Tensor,
    cu_seqlens: Tensor,
    aggregation: Aggregation,
    counts: GlobalCounts,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token, `dtype` [T]; 0 where `mask_T` (bool or 0/1) is 0. Sequences must be whole.

    - `token_mean`: 1 / tokens (DAPO, arXiv:2503.14476 eq. 8).
    - `sequence_mean`: 1 / (sequences * own length) (GRPO, arXiv:2402.03300 eq. 3; GSPO).
    - `constant_length`: 1 / (sequences * max_tokens): no length in any denominator (Dr. GRPO,
      arXiv:2503.20783).

    Raises ValueError for an unknown aggregation, or counts that are 0 although a token is trained.
    """
    check_packed(cu_seqlens, mask_T)
    mask_T = mask_T.to(dtype)
    if mask_T.numel() == 0:
        return mask_T
    if counts.tokens <= 0 or counts.sequences <= 0:
        if bool(mask_T.any()):
            raise ValueError(f"{counts} although this micro-batch trains {int(mask_T.sum())} tokens")
        return mask_T
    if aggregation == "token_mean":
        return mask_T / counts.tokens
    if aggregation == "sequence_mean":
        ids_T = sequence_ids(cu_seqlens, mask_T.numel())
        lengths_S = segment_sum(mask_T, ids_T, cu_seqlens.numel() - 1)
        return mask_T / (lengths_S.clamp(min=1.0)[ids_T] * counts.sequences)
    if aggregation == "constant_length":
        return mask_T / (counts.sequences * counts.max_tokens)
    raise ValueError(f"unknown aggregation {aggregation!r}; use token_mean, sequence_mean or constant_length")
