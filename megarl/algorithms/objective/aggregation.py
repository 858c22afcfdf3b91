"""Token weights, which turn the losses of tokens into one number by global counts.

The weight of each token is fixed before the first micro-batch, from counts of the whole mini-batch over all ranks. The
objective is then a plain sum of weight * loss, so no split into micro-batches or ranks can change it.

Shapes, as in `segments`: R response tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.interface.segments import check_packed, segment_sum, sequence_ids

Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]


@dataclass(frozen=True)
class GlobalCounts:
    """Holds the counts of one mini-batch over all ranks.

    `tokens`: tokens in the loss. `sequences`: sequences with at least one such token; a sequence that is masked as a
    whole (truncated, failed) is not counted. `max_tokens`: the value of `sampling.max_tokens`.
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
    """Return the weight of each token, [R] of `dtype`; it is 0 where `mask_R` ([R], bool or 0/1) is 0.

    The micro-batch must hold whole sequences. `cu_seqlens`: int32 [S + 1].

    - `token_mean`: 1 / tokens (DAPO, arXiv:2503.14476 eq. 8).
    - `sequence_mean`: 1 / (sequences * own length) (GRPO, arXiv:2402.03300 eq. 3; GSPO).
    - `constant_length`: 1 / (sequences * max_tokens), without any sequence's length (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: the aggregation is unknown, or the counts are 0 although a token is trained.
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
    if aggregation == "constant_length":
        return mask_R / (counts.sequences * counts.max_tokens)
    raise ValueError(f"unknown aggregation {aggregation!r}; use token_mean, sequence_mean or constant_length")
