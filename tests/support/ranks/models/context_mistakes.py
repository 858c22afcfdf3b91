"""Context parallelism with one rule broken at a time, on the ranks of a test world."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.models.common.embeddings import rope_utils

from megarl.models.megatron import layer_spec
from megarl.models.megatron.layer_spec import PackedAttention
from megarl.trainer import batch as batch_module
from megarl.trainer import logprobs as logprobs_module
from megarl.trainer import policy as policy_module
from megarl.trainer.batch import MicroBatch, TrainSample
from tests.support.ranks.training.policy import train

Patch = contextlib.AbstractContextManager[Any]


def _positions_of_rank_0() -> Patch:
    original = rope_utils._get_thd_freqs_on_this_cp_rank
    return mock.patch.object(rope_utils, "_get_thd_freqs_on_this_cp_rank", lambda rank, *rest: original(0, *rest))


def _later_tokens_seen_in_the_second_chunk() -> Patch:
    original = PackedAttention._product

    def unmasked(self: Any, q: Any, k: Any, v: Any, mask_RK: Any) -> Any:
        return original(self, q, k, v, None if mask_RK is None else torch.zeros_like(mask_RK))

    return mock.patch.object(PackedAttention, "_product", unmasked)


def _chunks_as_ranks_hold_them() -> Patch:
    def in_order(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).flatten(1, 2).flatten(1, 2).permute(0, 2, 1, 3)

    return mock.patch.object(layer_spec, "_in_order", in_order)


def _key_gradients_not_summed() -> Patch:
    original = layer_spec.gather_from_sequence_parallel_region
    return mock.patch.object(
        layer_spec, "gather_from_sequence_parallel_region", lambda x, group: original(x, False, group=group)
    )


def _own_gradients_only() -> Patch:
    """DDP's reduction keeps what each rank has computed itself."""

    def keep(output: torch.Tensor, whole: torch.Tensor, group: Any, **_: Any) -> SimpleNamespace:
        output.copy_(whole.chunk(group.size())[group.rank()])
        return SimpleNamespace(wait=lambda: None)

    return mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", keep)


def _logprobs_of_own_rows_only() -> Patch:
    return mock.patch.object(logprobs_module, "reduce_from_tensor_model_parallel_region", lambda x, group: x)


def _contiguous_shares() -> Patch:
    """Each rank packs one piece of a sequence, although attention takes it for two chunks."""

    def contiguous(cu_seqlens: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        rows, bounds = torch.arange(int(cu_seqlens[-1])), cu_seqlens.tolist()
        return torch.cat([rows[a:b].chunk(size)[rank] for a, b in pairwise(bounds)])

    return mock.patch.object(batch_module, "zigzag", contiguous)


def _targets_from_the_next_row() -> Patch:
    """As if the token after a chunk's last one were the next on the same rank."""
    original = policy_module.pack

    def mistaken(*args: Any, **kwargs: Any) -> MicroBatch:
        packed = original(*args, **kwargs)
        next_O = packed.input_ids_1T[0].roll(-1)[packed.rows_O]
        return replace(packed, targets_R=packed.targets_R.index_copy(0, packed.own_O, next_O))

    return mock.patch.object(policy_module, "pack", mistaken)


MUTATIONS: dict[str, Callable[[], Patch]] = {
    "none": contextlib.nullcontext,
    "positions": _positions_of_rank_0,
    "mask of the second chunk": _later_tokens_seen_in_the_second_chunk,
    "order of the keys": _chunks_as_ranks_hold_them,
    "sum of the keys' gradients": _key_gradients_not_summed,
    "reduction": _own_gradients_only,
    "log-probs of other ranks": _logprobs_of_own_rows_only,
    "zigzag": _contiguous_shares,
    "target of a chunk's last token": _targets_from_the_next_row,
}


def mutated(model_dir: Path, samples: list[TrainSample], what: str) -> dict[str, Any]:
    """One update over all ranks as context-parallel ranks, with the mistake `what`."""
    with MUTATIONS[what]():
        return train(model_dir, {"context": torch.distributed.get_world_size()}, samples)
