"""Which key of a checkpoint holds which Megatron parameter; pure, from a family's mapping table alone.

Keys are those that a Transformer Engine model under Megatron-Core's `singleton_local_shards` writes: one per layer and
per expert, the norm before a column-parallel layer fused into that layer's name, gate and up apart. They do not depend
on layout or layer spec, so local, Transformer Engine, sequential and grouped models share one checkpoint. A key's
tensor is the whole Megatron parameter, vocabulary unpadded or padded (rows beyond the vocabulary mean nothing).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.models.loader import listed
from megarl.models.mapping import Entry

_LAYER = re.compile(r"^(decoder\.layers\.\d+\.)(.*)$")
# A norm's name, the layer it is fused into by Transformer Engine (if the model has that layer), the fused name.
_FUSED_NORMS = (
    ("input_layernorm.weight", "self_attention.linear_qkv"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj"),
)
GATE_UP = ("_w", "_v")  # Megatron-Core's suffixes of the halves of a gated linear_fc1

SCHEME_VERSION = 1


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
                for half, (suffix, shape) in enumerate(zip(GATE_UP, entry.shapes, strict=True))
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


def resolve(found: Collection[str], wanted: Sequence[StoredTensor]) -> dict[str, str]:
    """The checkpoint's key of each wanted key that it has under another name of Megatron-Core's own.

    Its local layer spec fuses norms that Transformer Engine does not (before a mixture of experts), or leaves those
    apart that Transformer Engine fuses (multi-latent attention).
    """
    renamed = {}
    for stored in wanted:
        if stored.key not in found:
            other = next((key for key in _other_names(stored.entry.megatron) if key in found), None)
            if other is not None:
                renamed[stored.key] = other
    return renamed


def _other_names(name: str) -> list[str]:
    match = _LAYER.match(name)
    if match is None:
        return []
    layer, rest = match.groups()
    return [
        key for norm, linear in _FUSED_NORMS if rest == norm for key in (name, f"{layer}{linear}.layer_norm_weight")
    ]


def problems_of(found: Mapping[str, tuple[int, ...]], wanted: Sequence[StoredTensor]) -> list[str]:
    """What a checkpoint's model keys and shapes have against the model's; empty if nothing.

    More vocabulary rows than the model has are padding.
    """
    wrong = []
    for stored in wanted:
        shape = found.get(stored.key, stored.shape)
        padded = stored.entry.rule.pad_to_tp and shape[0] >= stored.shape[0] and shape[1:] == stored.shape[1:]
        if shape != stored.shape and not padded:
            wrong.append(f"{stored.key}: shape {list(shape)}, config.json means {list(stored.shape)}")
    keys = {stored.key for stored in wanted}
    return [
        *listed("missing keys", [stored.key for stored in wanted if stored.key not in found]),
        *listed("keys that the family does not have", sorted(set(found) - keys)),
        *listed("misshapen tensors", wrong),
    ]


def _key(name: str, entries: dict[str, Entry]) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    layer, rest = match.groups()
    for norm, linear in _FUSED_NORMS:
        if rest == norm and f"{layer}{linear}.weight" in entries:
            return f"{layer}{linear}.layer_norm_weight"
    return layer + rest.replace("mlp.experts.local_experts.", "mlp.experts.experts.")
