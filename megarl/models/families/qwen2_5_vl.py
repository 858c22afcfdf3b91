"""Qwen2.5-VL: Qwen2.5 with a vision tower that mostly uses windowed attention."""

from collections.abc import Mapping
from typing import Any

from megarl.models.families.base import DENSE, Family
from megarl.models.families.vision import language_config, read_tower, tower_rules

_DEFAULTS = {  # transformers' Qwen2_5_VLVisionConfig
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "out_hidden_size": 3584,
}
_BLOCK = "blocks.{layer}."
_SHAPES = {
    "patch_embed.proj.weight": "v_hidden v_channels v_frames v_patch v_patch",
    f"{_BLOCK}norm1.weight": "v_hidden",
    f"{_BLOCK}norm2.weight": "v_hidden",
    f"{_BLOCK}attn.qkv.weight": "v_qkv v_hidden",
    f"{_BLOCK}attn.qkv.bias": "v_qkv",
    f"{_BLOCK}attn.proj.weight": "v_hidden v_hidden",
    f"{_BLOCK}attn.proj.bias": "v_hidden",
    f"{_BLOCK}mlp.gate_proj.weight": "v_ffn v_hidden",
    f"{_BLOCK}mlp.gate_proj.bias": "v_ffn",
    f"{_BLOCK}mlp.up_proj.weight": "v_ffn v_hidden",
    f"{_BLOCK}mlp.up_proj.bias": "v_ffn",
    f"{_BLOCK}mlp.down_proj.weight": "v_hidden v_ffn",
    f"{_BLOCK}mlp.down_proj.bias": "v_hidden",
    "merger.ln_q.weight": "v_hidden",
    "merger.mlp.0.weight": "v_merged v_merged",
    "merger.mlp.0.bias": "v_merged",
    "merger.mlp.2.weight": "hidden v_merged",
    "merger.mlp.2.bias": "hidden",
}


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return {"qkv_bias": True, "vision": read_tower(raw, _DEFAULTS, mean, std)}


FAMILY = Family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    DENSE,
    _read,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    language=language_config,
    vision=lambda info: tower_rules("visual.", _SHAPES, info),
    # Published files have the table's names; these are transformers 5's names in memory.
    aliases=(("model.visual.", "visual."), ("model.language_model.", "model.")),
)
