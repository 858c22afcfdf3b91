"""Qwen3-MoE: Qwen3's attention; a model may have both dense and mixture-of-experts layers."""

from collections.abc import Mapping
from typing import Any

from megarl.models.families.base import MOE, Family, no_attention_bias, refuse_single_expert


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    no_attention_bias(raw)
    step, dense = int(raw.get("decoder_sparse_step") or 1), set(raw.get("mlp_only_layers") or [])
    experts = int(raw.get("num_experts") or raw["num_local_experts"])
    layers = range(int(raw["num_hidden_layers"]))
    if raw.get("norm_topk_prob"):
        refuse_single_expert(raw)
    return {
        "qk_norm": True,
        "head_dim": int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
        "num_experts": experts,
        "topk": int(raw["num_experts_per_tok"]),
        "moe_ffn": int(raw["moe_intermediate_size"]),
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
        "moe_layers": tuple(layer not in dense and experts > 0 and (layer + 1) % step == 0 for layer in layers),
    }


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", MOE, _read, defaults={"num_key_value_heads": 4})
