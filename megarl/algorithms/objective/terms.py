"""The terms of the training loss: `rl`, `ce` and `ref_kl`, each with its own per-token weights and counts.

A term is the sum of weight * aggregation weight * token loss over its tokens: those whose weight is not 0. The
aggregation weight depends on the number of the term's tokens and sequences in the whole mini-batch, over all ranks and
micro-batches. So neither layout nor packing changes it, and no term depends on another's tokens. Weights multiply a
token's loss but do not change its divisor. The objective is a plain sum of weight * loss, whose weights are fixed
before the first micro-batch.

Weights are data: a row may have them as a stream (`rl_weights`, `ce_weights`, `ref_kl_weights`). By default a row's
trained tokens have 1 in `rl` and `ref_kl`, and all tokens have 0 in `ce`.

Shapes: R response tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.interface.segments import check_packed, segment_sum, sequence_ids

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
