"""Packed sequences: 1-D tensors over the T response tokens of S sequences, cut by `cu_seqlens` (int32 [S+1]).

Sequence s owns positions cu_seqlens[s] .. cu_seqlens[s+1]-1; zero-length sequences and S = 0 are allowed.
Suffixes of names: _T per token, _S per sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_packed(cu_seqlens: Tensor, *tensors_T: Tensor) -> None:
    """Raise ValueError unless every tensor is 1-D with the `cu_seqlens[-1]` tokens that the cuts describe."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens must be 1-D with at least one entry, not shape {tuple(cu_seqlens.shape)}")
    for tensor in tensors_T:
        if tensor.dim() != 1 or tensor.shape != tensors_T[0].shape:
            shapes = [tuple(t.shape) for t in tensors_T]
            raise ValueError(f"per-token tensors must be 1-D and of equal length, not {shapes}")


def sequence_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Index of the sequence that owns each token: int64 [T]. ValueError if the cuts do not cover T tokens."""
    lengths_S = cu_seqlens[1:] - cu_seqlens[:-1]
    ids_S = torch.arange(lengths_S.numel(), device=cu_seqlens.device)
    ids_T = torch.repeat_interleave(ids_S, lengths_S.long())
    if ids_T.numel() != tokens:
        raise ValueError(f"cu_seqlens covers {ids_T.numel()} tokens, but the tensors hold {tokens}")
    return ids_T


def segment_sum(values_T: Tensor, ids_T: Tensor, sequences: int) -> Tensor:
    """Sum over each sequence: [S], differentiable, of `values_T`'s dtype."""
    return values_T.new_zeros(sequences).index_add(0, ids_T, values_T)


def expand(values_S: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Repeat one value per sequence over its tokens: [S] -> [T]."""
    return torch.repeat_interleave(values_S, (cu_seqlens[1:] - cu_seqlens[:-1]).long())
