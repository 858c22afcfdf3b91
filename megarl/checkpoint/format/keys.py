"""The keys of a checkpoint and the Megatron parameter that each holds, computed only from a family's mapping table.

The keys are those of a Transformer Engine model under Megatron-Core's `singleton_local_shards`: one per layer and per
expert; a norm before a column-parallel layer is fused into that layer's name; gate and up are separate, and so are the
sections of a Gated DeltaNet's projection. They do not depend on layout or layer spec, so local, Transformer Engine,
sequential and grouped models share one checkpoint. A key's tensor is the whole Megatron parameter, with the vocabulary
unpadded or padded (rows beyond the vocabulary have no meaning).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.models.architecture.mapping import FUSED_NORMS, Entry
from megarl.models.hf.directory import listed

_LAYER = re.compile(r"^(decoder\.layers\.\d+\.)(.*)$")

SCHEME_VERSION = 1


def content_metadata() -> dict[str, Any]:
    """Return the metadata that every `dist_checkpointing.save` and `sharded_state_dict` must get.

    A fresh dict each time, because Megatron-Core adds process groups to it. The optimizer's entries let any TP, PP,
    VPP, DP and EP load the distributed optimizer of any other.
    """
    return {
        "singleton_local_shards": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "megarl_scheme": SCHEME_VERSION,
    }


@dataclass(frozen=True)
class StoredTensor:
    """A key of a checkpoint, which holds the full (one-rank) Megatron parameter `entry`, or a section of its rows.

    `start`: the section's first row; `suffix`: of its key.
    """

    key: str
    shape: tuple[int, ...]
    entry: Entry
    start: int = 0
    suffix: str = ""


def stored_tensors(entries: dict[str, Entry]) -> dict[str, list[StoredTensor]]:
    """Return the keys of every parameter of a family's table, by canonical name, in layer order."""
    stored: dict[str, list[StoredTensor]] = {}
    for name, entry in entries.items():
        key, shape, start = _key(name, entries), entry.shard_shape(0, 1), 0
        stored[name] = []
        for suffix, rows in entry.sections.items():
            stored[name].append(StoredTensor(key + suffix, (rows, *shape[1:]), entry, start, suffix))
            start += rows
        stored[name] = stored[name] or [StoredTensor(key, shape, entry)]
    return stored


def is_model_key(key: str) -> bool:
    """Return whether a key is one of the model's weights (not optimizer, RNG or Transformer Engine's extra state)."""
    return key.startswith(("decoder.", "embedding.", "output_layer.", "visual.")) and "_extra_state" not in key


def resolve(found: Collection[str], wanted: Sequence[StoredTensor]) -> dict[str, str]:
    """Return the checkpoint's key for each wanted key that it stores under another of Megatron-Core's names.

    Unlike Transformer Engine, Megatron-Core's local layer spec fuses the norm before a mixture of experts, and does not
    fuse the norms of multi-latent attention.
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
    return [key for norm, linear in FUSED_NORMS if rest == norm for key in (name, f"{layer}{linear}.layer_norm_weight")]


def problems_of(found: Mapping[str, tuple[int, ...]], wanted: Sequence[StoredTensor]) -> list[str]:
    """Return lines that describe how a checkpoint's model keys and shapes differ from the model's; [] if equal.

    Additional vocabulary rows are padding, not a difference.
    """
    wrong = []
    for stored in wanted:
        shape = found.get(stored.key, stored.shape)
        padded = stored.entry.rule.pad_to_tp and shape[0] >= stored.shape[0] and shape[1:] == stored.shape[1:]
        if shape != stored.shape and not padded:
            wrong.append(f"{stored.key}: shape {list(shape)}, config.json implies {list(stored.shape)}")
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
    for norm, linear in FUSED_NORMS:
        if rest == norm and f"{layer}{linear}.weight" in entries:
            return f"{layer}{linear}.layer_norm_weight"
    return layer + rest.replace("mlp.experts.local_experts.", "mlp.experts.experts.")
