"""Packed sequences: 1-D tensors over the R response tokens of S sequences, laid end to end.

The bounds of the sequences are `cu_seqlens` (cumulative lengths, int32 [S + 1], named as in Megatron-Core): sequence s
owns positions cu_seqlens[s] .. cu_seqlens[s + 1] - 1. Sequences of length zero and S = 0 are allowed.

Suffixes of tensor names in this package: `_R` one value per response token, `_S` one value per sequence.
"""

import torch
from torch import Tensor


def check_packed(cu_seqlens: Tensor, *tensors_R: Tensor) -> None:
    """Raise ValueError unless `cu_seqlens` is 1-D and not empty, and the tensors are 1-D and of equal length."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens must be 1-D with at least one entry, not shape {tuple(cu_seqlens.shape)}")
    for tensor in tensors_R:
        if tensor.dim() != 1 or tensor.shape != tensors_R[0].shape:
            shapes = [tuple(t.shape) for t in tensors_R]
            raise ValueError(f"per-token tensors must be 1-D and of equal length, not {shapes}")


def sequence_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the index of each token's sequence, int64 [R].

    Raises ValueError unless `cu_seqlens` covers exactly R = `tokens` tokens.
    """
    lengths_S = cu_seqlens[1:] - cu_seqlens[:-1]
    ids_S = torch.arange(lengths_S.numel(), device=cu_seqlens.device)
    ids_R = torch.repeat_interleave(ids_S, lengths_S.long())
    if ids_R.numel() != tokens:
        raise ValueError(f"cu_seqlens covers {ids_R.numel()} tokens, but the tensors hold {tokens}")
    return ids_R


def segment_sum(values_R: Tensor, ids_R: Tensor, sequences: int) -> Tensor:
    """Return the sum over each sequence, [S], differentiable and in the dtype of `values_R`."""
    return values_R.new_zeros(sequences).index_add(0, ids_R, values_R)
