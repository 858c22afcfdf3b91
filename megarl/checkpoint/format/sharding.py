"""A rank's shards of a model for Megatron-Core's `torch_dist` format, under the keys of keys.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory

from megarl.checkpoint.format.keys import StoredTensor, stored_tensors
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.megatron.shards import Shard, local_shards, table


def model_sharded_state_dict(
    chunks: Sequence[torch.nn.Module], info: ModelInfo
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return this rank's parameters for `megatron.core.dist_checkpointing.save` and `load`, by canonical name.

    `chunks` may be wrapped in DDP and Float16Module. Each value's `.data` is the parameter itself, as Megatron's
    optimizers require; parameters with sections are factories. `load` writes in place. Raises ValueError for a
    parameter that the family's table does not cover.
    """
    entries = table(info)
    stored = stored_tensors(entries)
    return {shard.name: _sharded(shard, stored[shard.entry.megatron]) for shard in local_shards(chunks, info, entries)}


def _sharded(shard: Shard, stored: list[StoredTensor]) -> ShardedTensor | ShardedTensorFactory:
    replica = _replica(shard)
    if len(stored) == 1:
        return _sharded_tensor(stored[0].key, shard.parameter, shard, replica)
    base = stored[0].key.removesuffix(stored[0].suffix)

    def build(
        key: str, data: torch.Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        sections = data.detach().split([each.shape[0] // shard.size for each in stored])
        return [
            _sharded_tensor(key + each.suffix, section, shard, replica_id)
            for each, section in zip(stored, sections, strict=True)
        ]

    return ShardedTensorFactory(base, shard.parameter, build, torch.cat, replica)


def _sharded_tensor(key: str, data: torch.Tensor, shard: Shard, replica: ReplicaId) -> ShardedTensor:
    rule = shard.entry.rule
    place = [] if rule.axis is None else [(rule.axis, shard.rank, shard.size)]
    return ShardedTensor.from_rank_offsets(
        key,
        data,
        *place,
        replica_id=replica,
        # The number of padding rows depends on the tensor-parallel size; loading zeroes them first.
        allow_shape_mismatch=rule.pad_to_tp,
    )


def _replica(shard: Shard) -> tuple[int, int, int]:
    """Return the (pipeline, tensor, data) replica id of a shard; only (0, 0, 0) is written."""
    if shard.entry.expert is not None:
        data = parallel_state.get_expert_data_parallel_rank()
    else:
        data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    tensor = shard.rank if shard.entry.rule.axis is None else 0
    return (1 if shard.is_tied_copy else 0, tensor, data)
