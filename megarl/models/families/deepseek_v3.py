"""DeepSeek-V3 (also R1, V3.1, Moonlight): multi-head latent attention, shared experts, sigmoid router with a bias.

The files store rotated channels in interleaved pairs. Megatron's MLA reads this order (rope_utils.py,
`multi_latent_attention`), so no row is moved. Multi-token prediction (MTP) layers are neither trained nor exported.
"""

from collections.abc import Mapping
from typing import Any

from megarl.models.architecture.architecture import LatentAttention, ModelInfo
from megarl.models.architecture.rope import read_rope
from megarl.models.families.base import (
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    HEAD,
    NORMS,
    Family,
    layer_rule,
    mlp_rules,
    no_attention_bias,
    refuse_single_expert,
)

LATENT_NORM_EPS = 1e-6  # transformers ignores rms_norm_eps in these norms; vLLM uses it

_ATT, _MG = "self_attn", "self_attention"


def _compressed(info: ModelInfo) -> bool:
    return info.mla is not None and info.mla.query_rank is not None


LATENT_ATTENTION = (
    layer_rule(f"{_MG}.linear_q_proj.weight", f"{_ATT}.q_proj.weight", "q hidden", 0,
               when=lambda info: not _compressed(info)),
    layer_rule(f"{_MG}.linear_q_down_proj.weight", f"{_ATT}.q_a_proj.weight", "q_rank hidden", 0, when=_compressed),
    layer_rule(f"{_MG}.q_layernorm.weight", f"{_ATT}.q_a_layernorm.weight", "q_rank", when=_compressed),
    layer_rule(f"{_MG}.linear_q_up_proj.weight", f"{_ATT}.q_b_proj.weight", "q q_rank", 0, when=_compressed),
    layer_rule(f"{_MG}.linear_kv_down_proj.weight", f"{_ATT}.kv_a_proj_with_mqa.weight", "latent hidden", 0),
    layer_rule(f"{_MG}.kv_layernorm.weight", f"{_ATT}.kv_a_layernorm.weight", "kv_rank"),
    layer_rule(f"{_MG}.linear_kv_up_proj.weight", f"{_ATT}.kv_b_proj.weight", "kv_up kv_rank", 0),
    layer_rule(f"{_MG}.linear_proj.weight", f"{_ATT}.o_proj.weight", "hidden values", 1),
)  # fmt: skip
_BIAS = "mlp.gate.e_score_correction_bias"
SHARED_EXPERTS = (
    layer_rule("mlp.router.expert_bias", _BIAS, "experts", where="moe_layer", buffer=True),
    *mlp_rules("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", "moe_layer"),
)


_DEFAULTS = {
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    no_attention_bias(raw)
    _refuse(raw)
    heads = int(raw["num_attention_heads"])
    plain, rotated = int(raw["qk_nope_head_dim"]), int(raw["qk_rope_head_dim"])
    rank = raw.get("q_lora_rank")
    return {
        "mla": LatentAttention(
            query_rank=None if rank is None else int(rank),
            kv_rank=int(raw["kv_lora_rank"]),
            plain=plain,
            rotated=rotated,
            value=int(raw["v_head_dim"]),
            norm_eps=LATENT_NORM_EPS,
        ),
        "head_dim": plain + rotated,
        "kv_heads": heads,
        **sigmoid_router(raw),
    }


def sigmoid_router(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelInfo fields of a sigmoid router with a bias, and of shared experts."""
    experts, dense = raw.get("n_routed_experts"), int(raw.get("first_k_dense_replace") or 0)
    return {
        "num_experts": int(raw["num_local_experts"] if experts is None else experts),
        "topk": int(raw["num_experts_per_tok"]),
        "moe_ffn": int(raw["moe_intermediate_size"]),
        "moe_layers": tuple(layer >= dense for layer in range(int(raw["num_hidden_layers"]))),
        "shared_ffn": int(raw.get("n_shared_experts") or 0) * int(raw["moe_intermediate_size"]),
        "router_score": "sigmoid",
        "router_groups": _groups(raw),
        "router_scale": float(raw.get("routed_scaling_factor") or 1.0),
        "expert_bias": True,
        "predict_layers": int(raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers", 1)) or 0),
    }


def _groups(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (groups, groups per token), or None if every token may use every group.

    Raises ValueError if Megatron-Core would rank groups by another number of experts than the model.
    """
    groups, kept = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    if kept >= groups:
        return None
    if int(raw["num_experts_per_tok"]) // kept != 2:
        raise ValueError(
            f"num_experts_per_tok={raw['num_experts_per_tok']} with topk_group={kept} is not supported: the model "
            "ranks groups by their 2 best experts, Megatron-Core by num_experts_per_tok // topk_group; supported: 2"
        )
    return groups, kept


def refuse_router(raw: Mapping[str, Any], **more: object) -> None:
    """Raise ValueError for settings that Megatron-Core's router cannot express.

    `more`: further keys, each with its only supported value.
    """
    supported = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        **more,
    }
    for key, value in supported.items():
        if raw.get(key) not in (value, None):
            raise ValueError(f"{key}={raw[key]!r} is not supported in this family; supported: {value!r}")
    refuse_single_expert(raw)


def _refuse(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that Megatron-Core's latent attention and router cannot express."""
    refuse_router(raw, rope_interleave=True, num_key_value_heads=raw["num_attention_heads"])
    _, scaling = read_rope(raw)
    if scaling is None:
        return
    if scaling["rope_type"] != "yarn":
        raise ValueError(f"RoPE scaling {scaling['rope_type']!r} is not supported in this family; supported: yarn")
    if scaling.get("attention_factor") is not None or not scaling.get("truncate", True):
        raise ValueError("attention_factor and truncate=false are not supported in this family")
    if scaling.get("mscale_all_dim") and not scaling.get("mscale"):
        raise ValueError("mscale_all_dim needs mscale: Megatron-Core has one formula for both")


def left_out(info: ModelInfo) -> tuple[str, ...]:
    """Return the name prefixes of the multi-token prediction layers."""
    return tuple(f"model.layers.{info.num_layers + i}." for i in range(info.predict_layers))


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    EMBEDDING + NORMS + LATENT_ATTENTION + DENSE_MLP + EXPERTS + SHARED_EXPERTS + HEAD,
    _read,
    defaults=_DEFAULTS,
    left_out=left_out,
    engine_keys={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)
