"""Qwen3-VL: Qwen3 with a vision tower, several of whose layers feed the first language layers (deepstack).

The mixture of experts is Qwen3-MoE's, with all experts of a layer in one tensor.
"""

from collections.abc import Mapping
from typing import Any

from megarl.models.families import qwen3, qwen3_moe
from megarl.models.families.base import DENSE, MOE, Family
from megarl.models.families.vision import language_config, read_tower, tower_rules, under

_DEFAULTS = {  # transformers' Qwen3VLVisionConfig
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}


def _affine(name: str, inner: str, outer: str) -> dict[str, str]:
    return {f"{name}.weight": f"{outer} {inner}".strip(), f"{name}.bias": outer or inner}


_BLOCK, _DEEP = "blocks.{layer}.", "deepstack_merger_list.{deep}."
_SHAPES = {
    "patch_embed.proj.weight": "v_hidden v_channels v_frames v_patch v_patch",
    "patch_embed.proj.bias": "v_hidden",
    "pos_embed.weight": "v_places v_hidden",
    **_affine(f"{_BLOCK}norm1", "v_hidden", ""),
    **_affine(f"{_BLOCK}norm2", "v_hidden", ""),
    **_affine(f"{_BLOCK}attn.qkv", "v_hidden", "v_qkv"),
    **_affine(f"{_BLOCK}attn.proj", "v_hidden", "v_hidden"),
    **_affine(f"{_BLOCK}mlp.linear_fc1", "v_hidden", "v_ffn"),
    **_affine(f"{_BLOCK}mlp.linear_fc2", "v_ffn", "v_hidden"),
    **_affine("merger.norm", "v_hidden", ""),
    **_affine("merger.linear_fc1", "v_merged", "v_merged"),
    **_affine("merger.linear_fc2", "v_merged", "hidden"),
    **_affine(f"{_DEEP}norm", "v_merged", ""),
    **_affine(f"{_DEEP}linear_fc1", "v_merged", "v_merged"),
    **_affine(f"{_DEEP}linear_fc2", "v_merged", "hidden"),
}
LANGUAGE = "model.language_model."


def _vision(raw: Mapping[str, Any]) -> dict[str, Any]:
    half = (0.5, 0.5, 0.5)
    return {"vision": read_tower(raw, _DEFAULTS, half, half, interleaved=True)}


def _read_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    if not raw.get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob=false is not supported in this family: transformers ignores it")
    return qwen3_moe.FAMILY.read({**raw, "norm_topk_prob": True}) | _vision(raw)


_EXPERTS = f"{LANGUAGE}layers.{{layer}}.mlp.experts."
DENSE_FAMILY = Family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    under(LANGUAGE, DENSE),
    lambda raw: qwen3.FAMILY.read(raw) | _vision(raw),
    defaults={"num_key_value_heads": 32, "rope_theta": 5e6},
    language=language_config,
    vision=lambda info: tower_rules("model.visual.", _SHAPES, info),
)
MOE_FAMILY = Family(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    under(LANGUAGE, MOE),
    _read_moe,
    defaults={"num_key_value_heads": 16, "rope_theta": 5e6},
    language=language_config,
    vision=DENSE_FAMILY.vision,
    fused=(
        (f"{_EXPERTS}gate_up_proj", (f"{_EXPERTS}{{expert}}.gate_proj.weight", f"{_EXPERTS}{{expert}}.up_proj.weight")),
        (f"{_EXPERTS}down_proj", (f"{_EXPERTS}{{expert}}.down_proj.weight",)),
    ),
)
