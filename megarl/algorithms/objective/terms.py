"""The terms of the training loss: `rl`, `ce` and `ref_kl`, each with per-token weights and counts of its own.

A term is the sum of weight * aggregation weight * token loss over its tokens, which are those with a weight other
than 0. Its aggregation weight follows from the number of its own tokens and sequences in the whole mini-batch, over all
ranks and micro-batches, so that no layout and no packing changes it, and no term depends on how many tokens another one
has. Weights multiply a token's loss, and do not change by what it is divided.

Weights are data: a row may bring them as a stream (`rl_weights`, `ce_weights`, `ref_kl_weights`). Without one, the
trained tokens of a row have 1 in `rl` and `ref_kl`, and all tokens have 0 in `ce`.

Shapes: R response tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.objective.aggregation import GlobalCounts

TermName = Literal["rl", "ce", "ref_kl"]
TERMS: tuple[TermName, ...] = ("rl", "ce", "ref_kl")


def weight_stream(term: TermName) -> str:
    """Return the name of the stream of a term's weights."""
    return f"{term}_weights"


WEIGHT_STREAMS = tuple(weight_stream(term) for term in TERMS)


@dataclass(frozen=True)
class TermCounts:
    """The tokens and sequences of each term in one mini-batch, over all ranks."""

    rl: GlobalCounts
    ce: GlobalCounts
    ref_kl: GlobalCounts

    @classmethod
    def without_streams(cls, trained: GlobalCounts) -> TermCounts:
        """Return the counts of samples that bring no weights, from the counts of their trained tokens."""
        return cls(rl=trained, ce=GlobalCounts(0, 0, trained.max_tokens), ref_kl=trained)

    @classmethod
    def total(cls, parts: Iterable[TermCounts], max_tokens: int) -> TermCounts:
        """Return the counts of disjoint parts together."""
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

    `rl` and `ref_kl` are terms of trained tokens; `ce` is one of any response tokens, those of a tool included.
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
