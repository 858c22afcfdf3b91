"""GLM-4.5, 4.6 and 4.7 (Air too): grouped-query attention with partial RoPE, DeepSeek-V3's router and shared experts.

`attention_bias` is a bias on q, k and v alone here. The layer that predicts later tokens (MTP) is neither trained nor
exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.architecture.rope import rotary_share
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
