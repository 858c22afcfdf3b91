"""The declaration of a model family, and the mapping rules that most decoder-only families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Rule, RuleScope, Source, qkv


@dataclass(frozen=True)
class Family:
    """A model family: its Hugging Face architecture, the reader of its config, and its mapping table.

    `read(raw)` returns the ModelInfo fields that are specific to the family. `defaults`: values of keys that
    `config.json` may omit, where `transformers`' config class has another default than `info_from_config`.

    Only two kinds of tensors may stay unread. `redundant`: name templates of tensors that old files contain although
    they are recomputed. `left_out`: name prefixes of parts that are neither trained nor exported.

    `engine_keys`: keys of `config.json` without which vLLM fails or computes another model, with their only correct
    values. Published files have them; `transformers` does not write them.

    For vision-language models: `language(raw)` returns the language model's config in the form of a text model's,
    `vision(info)` the tower's rules, which come before `rules`, and `aliases` pairs of name prefixes: the files', and
    the table's.

    `fused`: tensors that hold the matrices of all experts of a layer, [experts, in, out]: name template, and the
    templates of the matrices, concatenated along `out` (see models/hf/fused.py). `fused_rows`: the same for
    [experts, out, in]; files may have these instead of matrices, an export has matrices.

    `sees`: for text models, the architecture of files that also hold a vision tower; their `text_config` is the model.
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
    defaults: Mapping[str, Any] = field(default_factory=dict)
    left_out: Callable[[ModelInfo], tuple[str, ...]] = lambda info: ()
    redundant: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    engine_keys: Mapping[str, object] = field(default_factory=dict)
    language: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda raw: raw
    vision: Callable[[ModelInfo], tuple[Rule, ...]] = lambda info: ()
    aliases: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fused_rows: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sees: str = ""

    def rules_of(self, info: ModelInfo) -> tuple[Rule, ...]:
        """Return all rules of a model of this family."""
        return self.vision(info) + self.rules


HF, MEGATRON = "model.layers.{layer}", "decoder.layers.{layer}"

EMBEDDING = (
    Rule(
        "embedding.word_embeddings.weight",
        (Source("model.embed_tokens.weight", "vocab hidden"),),
        0,
        pad_to_tp=True,
    ),
)

NORMS = (
    Rule(f"{MEGATRON}.input_layernorm.weight", (Source(f"{HF}.input_layernorm.weight", "hidden"),), where="layer"),
    Rule(
        f"{MEGATRON}.pre_mlp_layernorm.weight",
        (Source(f"{HF}.post_attention_layernorm.weight", "hidden"),),
        where="layer",
    ),
)

ATTENTION = (
    Rule(
        f"{MEGATRON}.self_attention.linear_qkv.weight",
        (
            Source(f"{HF}.self_attn.q_proj.weight", "q hidden"),
            Source(f"{HF}.self_attn.k_proj.weight", "kv hidden"),
            Source(f"{HF}.self_attn.v_proj.weight", "kv hidden"),
        ),
        axis=0,
        where="layer",
        arrange=qkv,
    ),
    Rule(
        f"{MEGATRON}.self_attention.linear_qkv.bias",
        (
            Source(f"{HF}.self_attn.q_proj.bias", "q"),
            Source(f"{HF}.self_attn.k_proj.bias", "kv"),
            Source(f"{HF}.self_attn.v_proj.bias", "kv"),
        ),
        axis=0,
        where="layer",
        arrange=qkv,
        when=lambda info: info.qkv_bias,
    ),
    Rule(
        f"{MEGATRON}.self_attention.q_layernorm.weight",
        (Source(f"{HF}.self_attn.q_norm.weight", "head_dim"),),
        where="layer",
        when=lambda info: info.qk_norm,
    ),
    Rule(
        f"{MEGATRON}.self_attention.k_layernorm.weight",
        (Source(f"{HF}.self_attn.k_norm.weight", "head_dim"),),
        where="layer",
        when=lambda info: info.qk_norm,
    ),
    Rule(
        f"{MEGATRON}.self_attention.linear_proj.weight",
        (Source(f"{HF}.self_attn.o_proj.weight", "hidden q"),),
        axis=1,
        where="layer",
    ),
)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def mlp_rules(
    megatron: str, hf: str, columns: str, where: RuleScope, projections: tuple[str, str, str] = _PROJECTIONS
) -> tuple[Rule, ...]:
    """Return the rules of a gated MLP of a layer: a dense one, an expert, or a shared expert.

    `megatron`, `hf`: its names in the layer; `columns`: the symbol of its inner size, as in `Source`; `projections`:
    the Hugging Face names of gate, up and down.
    """
    *inwards, outwards = projections
    return (
        Rule(
            f"{MEGATRON}.{megatron}.linear_fc1.weight",
            tuple(Source(f"{HF}.{hf}.{name}.weight", f"{columns} hidden") for name in inwards),
            axis=0,
            where=where,
            per_source=True,
        ),
        Rule(
            f"{MEGATRON}.{megatron}.linear_fc2.weight",
            (Source(f"{HF}.{hf}.{outwards}.weight", f"hidden {columns}"),),
            axis=1,
            where=where,
        ),
    )


DENSE_MLP = mlp_rules("mlp", "mlp", "ffn", "dense_layer")


def expert_rules(
    router: str = "mlp.gate", experts: str = "mlp.experts", projections: tuple[str, str, str] = _PROJECTIONS
) -> tuple[Rule, ...]:
    """Return the rules of a layer's router and experts.

    Hugging Face names: `router`.weight, `experts`.{number}.{projection}.weight.
    """
    return (
        Rule(f"{MEGATRON}.mlp.router.weight", (Source(f"{HF}.{router}.weight", "experts hidden"),), where="moe_layer"),
        *mlp_rules("mlp.experts.local_experts.{expert}", f"{experts}.{{expert}}", "moe_ffn", "moe_layer", projections),
    )


EXPERTS = expert_rules()

# The last pipeline stage of a tied model holds a copy of the embedding as its output layer; see `shards.TIED_COPY`.
HEAD = (
    Rule("decoder.final_layernorm.weight", (Source("model.norm.weight", "hidden"),)),
    Rule(
        "output_layer.weight",
        (Source("lm_head.weight", "vocab hidden"),),
        axis=0,
        pad_to_tp=True,
        when=lambda info: not info.tied,
    ),
)

DENSE = EMBEDDING + NORMS + ATTENTION + DENSE_MLP + HEAD
MOE = EMBEDDING + NORMS + ATTENTION + DENSE_MLP + EXPERTS + HEAD


def refuse_single_expert(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for one expert per token with weight 1: Megatron-Core does not normalise a single one."""
    if int(raw["num_experts_per_tok"]) < 2:
        raise ValueError("num_experts_per_tok=1 is not supported: Megatron-Core does not normalise a single expert")


def no_attention_bias(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for `attention_bias: true`, which in these families includes a bias on o_proj."""
    if raw.get("attention_bias"):
        raise ValueError("attention_bias=true (a bias on o_proj) is not supported")


def sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Return the width of the sliding attention window in tokens, None for full attention.

    Raises ValueError if `layer_types` gives some layers another kind of attention.
    """
    window = raw.get("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    other = set(raw.get("layer_types") or ()) - {kind}
    if other:
        raise ValueError(f"layer_types has {sorted(other)}; sliding_window={window} means {kind!r} in every layer")
    return None if window is None else int(window)
