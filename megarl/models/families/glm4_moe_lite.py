"""GLM-4.7-Flash: DeepSeek-V3's layers with plain RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.families import deepseek_v3


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    fields = deepseek_v3.FAMILY.read(raw)
    # transformers 5 writes a kind for each layer and not `first_k_dense_replace`, which published files have.
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return fields
    layers = tuple(kind == "sparse" for kind in kinds)
    agree = raw.get("first_k_dense_replace") is None or layers == fields["moe_layers"]
    if not agree or len(layers) != int(raw["num_hidden_layers"]):
        raise ValueError("mlp_layer_types contradicts num_hidden_layers or first_k_dense_replace; keep one of them")
    return {**fields, "moe_layers": layers}


FAMILY = replace(
    deepseek_v3.FAMILY,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read=_read,
    defaults={
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
    engine_keys={"first_k_dense_replace": 1},
)
