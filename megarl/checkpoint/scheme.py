"""The one checkpoint scheme: which key of a Megatron-Core `torch_dist` checkpoint holds which Megatron parameter.

Keys are those that a Transformer Engine model under Megatron-Core's `singleton_local_shards` writes: one per layer and
per expert, the norm before a column-parallel layer fused into that layer's name, gate and up apart. They do not depend
on layout or layer spec, so local, Transformer Engine, sequential and grouped models share one checkpoint. A key's
tensor is the whole Megatron parameter, vocabulary unpadded or padded (rows beyond the vocabulary mean nothing).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory

from megarl.models.info import ModelInfo
from megarl.models.mapping import Entry
from megarl.models.shards import Shard, local_shards, table

SCHEME_VERSION = 1
_LAYER = re.compile(r"^(decoder\.layers\.\d+\.)(.*)$")
# A norm's name, the layer it is fused into by Transformer Engine (if the model has that layer), the fused name.
_FUSED_NORMS = (
    ("input_layernorm.weight", "self_attention.linear_qkv"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj"),
)
_GATE_UP = ("_w", "_v")  # Megatron-Core's suffixes of the halves of a gated linear_fc1


def content_metadata() -> dict[str, Any]:
    """What `dist_checkpointing.save(content_metadata=)` and every `sharded_state_dict(metadata=)` call must get.

    A fresh dict: Megatron-Core adds process groups to the one it is given. The optimizer's entries are for the
    distributed optimizer: any TP, PP, VPP, DP and EP may load what another one saved.
    """
    return {
        "singleton_local_shards": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "megarl_scheme": SCHEME_VERSION,
    }


@dataclass(frozen=True)
class StoredTensor:
    """One key of a checkpoint: rows of the full (one-rank) Megatron parameter `entry`.

    `half`: 0 or 1 for the gate or up rows of a gated layer (each a Hugging Face tensor of its own), None for the
    whole parameter.
    """

    key: str
    shape: tuple[int, ...]
    entry: Entry
    half: int | None


def stored_tensors(entries: dict[str, Entry]) -> dict[str, list[StoredTensor]]:
    """The keys of every parameter of a family's table, by canonical name, in layer order."""
    stored: dict[str, list[StoredTensor]] = {}
    for name, entry in entries.items():
        key = _key(name, entries)
        if is_gated(entry):
            stored[name] = [
                StoredTensor(key + suffix, shape, entry, half)
                for half, (suffix, shape) in enumerate(zip(_GATE_UP, entry.shapes, strict=True))
            ]
        else:
            stored[name] = [StoredTensor(key, entry.shard_shape(0, 1), entry, None)]
    return stored


def is_gated(entry: Entry) -> bool:
    """Whether the parameter is stored as two tensors, gate and up."""
    return entry.rule.per_source and len(entry.names) == 2


def is_model_key(key: str) -> bool:
    """Whether a key belongs to the model's weights (not to optimizer, RNG or Transformer Engine's extra state)."""
    return key.startswith(("decoder.", "embedding.", "output_layer.")) and "_extra_state" not in key


def model_sharded_state_dict(
    chunks: Sequence[torch.nn.Module], info: ModelInfo
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """This rank's parameters for `megatron.core.dist_checkpointing.save` and `load`, by canonical name.

    `chunks` may be wrapped in DDP and Float16Module. `.data` of each value is the parameter itself, as Megatron's
    optimizers need; gated layers are factories. `load` writes into the parameters in place.
    Raises ValueError for a parameter that the family's table does not cover.
    """
    entries = table(info)
    stored = stored_tensors(entries)
    return {shard.name: _sharded(shard, stored[shard.entry.megatron]) for shard in local_shards(chunks, info, entries)}


def _key(name: str, entries: dict[str, Entry]) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    layer, rest = match.groups()
    for norm, linear in _FUSED_NORMS:
        if rest == norm and f"{layer}{linear}.weight" in entries:
            return f"{layer}{linear}.layer_norm_weight"
    return layer + rest.replace("mlp.experts.local_experts.", "mlp.experts.experts.")


def _sharded(shard: Shard, stored: list[StoredTensor]) -> ShardedTensor | ShardedTensorFactory:
    replica = _replica(shard)
    if len(stored) == 1:
        return _sharded_tensor(stored[0].key, shard.parameter, shard, replica)
    base = stored[0].key.removesuffix(_GATE_UP[0])

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> Any:
        halves = torch.chunk(data.detach(), 2)
        return [
            _sharded_tensor(key + suffix, half, shard, replica_id)
            for suffix, half in zip(_GATE_UP, halves, strict=True)
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
        # The number of padding rows differs between tensor-parallel sizes; loading zeroes them first.
        allow_shape_mismatch=rule.pad_to_tp,
    )


def _replica(shard: Shard) -> tuple[int, int, int]:
    """(pipeline, tensor, data) replica of a shard; only (0, 0, 0) is written."""
    if shard.entry.expert is not None:
        data = parallel_state.get_expert_data_parallel_rank()
    else:
        data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    tensor = shard.rank if shard.entry.rule.axis is None else 0
    return (1 if shard.is_tied_copy else 0, tensor, data)
