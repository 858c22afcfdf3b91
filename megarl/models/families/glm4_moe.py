"""GLM-4.5, 4.6, 4.7 and Air: grouped-query attention with partial RoPE, DeepSeek-V3's router and shared experts.

Here `attention_bias` means q, k and v only. The multi-token prediction (MTP) layer is neither trained nor exported.
GLM-4.7-Flash (`glm4_moe_lite`) has DeepSeek-V3's layers with plain RoPE.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.architecture.rope import rotary_share
from megarl.models.families import deepseek_v3
from megarl.models.families.base import ATTENTION, DENSE_MLP, EMBEDDING, EXPERTS, HEAD, NORMS, Family
from megarl.models.families.deepseek_v3 import SHARED_EXPERTS, left_out, refuse_router, sigmoid_router


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse_router(raw)
    head_dim = int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])
    return {
        "qkv_bias": bool(raw.get("attention_bias")),
        "qk_norm": bool(raw.get("use_qk_norm")),
        "rotary_dim": int(head_dim * rotary_share(raw)),
        **sigmoid_router(raw),
    }


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    EMBEDDING + NORMS + ATTENTION + DENSE_MLP + EXPERTS + SHARED_EXPERTS + HEAD,
    _read,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    left_out=left_out,
)


def _read_lite(raw: Mapping[str, Any]) -> dict[str, Any]:
    fields = deepseek_v3.FAMILY.read(raw)
    # transformers 5 writes the kind of each layer; published files have `first_k_dense_replace` instead.
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return fields
    layers = tuple(kind == "sparse" for kind in kinds)
    agree = raw.get("first_k_dense_replace") is None or layers == fields["moe_layers"]
    if not agree or len(layers) != int(raw["num_hidden_layers"]):
        raise ValueError("mlp_layer_types contradicts num_hidden_layers or first_k_dense_replace; keep one of them")
    return {**fields, "moe_layers": layers}


LITE_FAMILY = replace(
    deepseek_v3.FAMILY,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read=_read_lite,
    defaults={
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
    engine_keys={"first_k_dense_replace": 1},
)
