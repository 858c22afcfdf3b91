"""Qwen3.5 and Qwen3.6 (dense and mixtures of experts) and Qwen3-Next: three of four layers are Gated DeltaNet.

The fourth has attention with a gate per query head. Norms scale by 1 + weight, except the one inside a DeltaNet layer.
Published Qwen3.5 files also hold a vision tower and multi-token prediction (MTP) layers. Only the language model is
read, trained and exported (as `Qwen3_5ForCausalLM`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.architecture.architecture import DeltaNet, ModelInfo
from megarl.models.architecture.mapping import Piece, Rule, Source, gated_qkv
from megarl.models.architecture.rope import rotary_share
from megarl.models.families import qwen3_moe
from megarl.models.families.base import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERTS,
    HEAD,
    HF,
    MEGATRON,
    NORMS,
    Family,
    layer_rule,
    mlp_rules,
    no_attention_bias,
)
from megarl.models.families.vision import language_config

_HF, _MG = f"{HF}.linear_attn", f"{MEGATRON}.self_attention"
_EXPERT = "model.layers.{layer}.mlp.experts."


def _sections(info: ModelInfo) -> dict[str, int]:
    """Return the rows of each part of a DeltaNet layer's projection; beta and alpha have one per value head."""
    assert info.delta is not None
    keys, values, heads = info.delta.keys, info.delta.values, info.delta.value_heads
    return {".query": keys, ".key": keys, ".value": values, ".z": values, ".beta": heads, ".alpha": heads}


def _mixed(info: ModelInfo) -> dict[str, int]:
    return {name: rows for name, rows in _sections(info).items() if name in (".query", ".key", ".value")}


def _by_key_head(info: ModelInfo) -> list[Piece]:
    """Return the projection's pieces for files that store queries, key, values and z together per key head."""
    delta = info.delta
    assert delta is not None
    repeat = delta.value_heads // delta.key_heads
    pieces: list[Piece] = []
    for source, sizes in ((0, [delta.key_dim] * 2 + [repeat * delta.value_dim] * 2), (1, [repeat] * 2)):
        for number, size in enumerate(sizes):
            starts = [head * sum(sizes) + sum(sizes[:number]) for head in range(delta.key_heads)]
            pieces += [Piece(source, start, start + size) for start in starts]
    return pieces


def _delta_rule(megatron: str, hf: str, shape: str, axis: int | None = None, **more: Any) -> Rule:  # noqa: ANN401
    return layer_rule(f"self_attention.{megatron}", f"linear_attn.{hf}", shape, axis, "delta_layer", **more)


def _delta_rules(projection: Rule) -> tuple[Rule, ...]:
    return (
        projection,
        _delta_rule("conv1d.weight", "conv1d.weight", "delta_mixed one delta_conv", 0, sections=_mixed),
        *(_delta_rule(name, name, "delta_heads", 0, fp32=True) for name in ("dt_bias", "A_log")),
        _delta_rule("out_norm.weight", "norm.weight", "delta_value"),
        _delta_rule("out_proj.weight", "out_proj.weight", "hidden delta_values", 1),
    )


def _gated(rule: Rule) -> Rule:
    """Return a rule of ATTENTION limited to attention layers; their q_proj yields queries and gates."""
    rule = replace(rule, where="attention_layer")
    if not rule.megatron.endswith("linear_qkv.weight"):
        return rule
    queries, *others = rule.sources
    return replace(rule, sources=(replace(queries, shape="q_gated hidden"), *others), arrange=gated_qkv)


_IN_PROJ = Rule(
    f"{_MG}.in_proj.weight",
    (
        Source(f"{_HF}.in_proj_qkv.weight", "delta_mixed hidden"),
        Source(f"{_HF}.in_proj_z.weight", "delta_values hidden"),
        Source(f"{_HF}.in_proj_b.weight", "delta_heads hidden"),
        Source(f"{_HF}.in_proj_a.weight", "delta_heads hidden"),
    ),
    axis=0,
    where="delta_layer",
    sections=_sections,
)
_IN_PROJ_BY_KEY_HEAD = replace(
    _IN_PROJ,
    sources=(
        Source(f"{_HF}.in_proj_qkvz.weight", "delta_qkvz hidden"),
        Source(f"{_HF}.in_proj_ba.weight", "delta_ba hidden"),
    ),
    arrange=_by_key_head,
)
_ATTENTION = tuple(map(_gated, ATTENTION))
_SHARED_EXPERT = (
    layer_rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one hidden", where="moe_layer"),
    *mlp_rules("mlp.shared_experts", "mlp.shared_expert", "shared_ffn", "moe_layer"),
)


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    no_attention_bias(raw)
    layers = int(raw["num_hidden_layers"])
    every = int(raw.get("full_attention_interval") or 4)
    kinds = raw.get("layer_types") or ["full" if (i + 1) % every == 0 else "linear" for i in range(layers)]
    kinds = [str(kind).removesuffix("_attention") for kind in kinds]
    if len(kinds) != layers or set(kinds) - {"linear", "full"}:
        raise ValueError("layer_types must say linear_attention or full_attention for each of num_hidden_layers")
    delta = DeltaNet(
        tuple(kind == "linear" for kind in kinds),
        key_heads=int(raw["linear_num_key_heads"]),
        value_heads=int(raw["linear_num_value_heads"]),
        key_dim=int(raw["linear_key_head_dim"]),
        value_dim=int(raw["linear_value_head_dim"]),
        conv=int(raw["linear_conv_kernel_dim"]),
    )
    if delta.value_heads % delta.key_heads:
        raise ValueError("linear_num_value_heads must be a multiple of linear_num_key_heads")
    return {
        "qk_norm": True,
        "rotary_dim": int(int(raw["head_dim"]) * rotary_share(raw)),
        "attention_gate": True,
        "zero_centered_norms": True,
        "delta": delta,
    }


def _read_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    if not raw.get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob=false is not supported in this family")
    return {
        **qwen3_moe.FAMILY.read({**raw, "norm_topk_prob": True}),
        **_read(raw),
        "shared_ffn": int(raw["shared_expert_intermediate_size"]),
        "shared_expert_gate": True,
    }


_DEFAULTS = {
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MOE_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

DENSE_FAMILY = Family(
    "qwen3_5",
    "Qwen3_5ForCausalLM",
    EMBEDDING + NORMS + _ATTENTION + _delta_rules(_IN_PROJ) + DENSE_MLP + HEAD,
    _read,
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    left_out=lambda info: ("mtp.", "model.visual."),
    sees="Qwen3_5ForConditionalGeneration",
    language=lambda raw: language_config(raw) if "text_config" in raw else raw,
    aliases=(("model.language_model.", "model."),),
)
MOE_FAMILY = replace(
    DENSE_FAMILY,
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForCausalLM",
    rules=EMBEDDING + NORMS + _ATTENTION + _delta_rules(_IN_PROJ) + EXPERTS + _SHARED_EXPERT + HEAD,
    read=_read_moe,
    defaults={**_MOE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
    sees="Qwen3_5MoeForConditionalGeneration",
    fused_rows=(
        (f"{_EXPERT}gate_up_proj", (f"{_EXPERT}{{expert}}.gate_proj.weight", f"{_EXPERT}{{expert}}.up_proj.weight")),
        (f"{_EXPERT}down_proj", (f"{_EXPERT}{{expert}}.down_proj.weight",)),
    ),
)
NEXT_FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    EMBEDDING + NORMS + _ATTENTION + _delta_rules(_IN_PROJ_BY_KEY_HEAD) + DENSE_MLP + EXPERTS + _SHARED_EXPERT + HEAD,
    _read_moe,
    defaults={**_MOE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10},
    left_out=lambda info: ("mtp.",),
)
