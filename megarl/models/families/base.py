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


def layer_rule(
    megatron: str, hf: str, shape: str, axis: int | None = None, where: RuleScope = "layer", **more: Any,  # noqa: ANN401
) -> Rule:  # fmt: skip
    """Return the rule of a parameter of a layer that is one Hugging Face tensor, by their names in the layer.

    `more`: further fields of `Rule`.
    """
    return Rule(f"{MEGATRON}.{megatron}", (Source(f"{HF}.{hf}", shape),), axis, where, **more)


NORMS = (
    layer_rule("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
)
# The sources of Megatron's fused projection, and the symbols of their rows.
_QKV = (("q", "q"), ("k", "kv"), ("v", "kv"))
ATTENTION = (
    Rule(
        f"{MEGATRON}.self_attention.linear_qkv.weight",
        tuple(Source(f"{HF}.self_attn.{name}_proj.weight", f"{rows} hidden") for name, rows in _QKV),
        axis=0,
        where="layer",
        arrange=qkv,
    ),
    Rule(
        f"{MEGATRON}.self_attention.linear_qkv.bias",
        tuple(Source(f"{HF}.self_attn.{name}_proj.bias", rows) for name, rows in _QKV),
        axis=0,
        where="layer",
        arrange=qkv,
        when=lambda info: info.qkv_bias,
    ),
    *(
        layer_rule(f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight", "head_dim",
                   when=lambda info: info.qk_norm)
        for name in ("q", "k")
    ),
    layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden q", axis=1),
)  # fmt: skip

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
        layer_rule(f"{megatron}.linear_fc2.weight", f"{hf}.{outwards}.weight", f"hidden {columns}", 1, where),
    )


DENSE_MLP = mlp_rules("mlp", "mlp", "ffn", "dense_layer")


def expert_rules(
    router: str = "mlp.gate", experts: str = "mlp.experts", projections: tuple[str, str, str] = _PROJECTIONS
) -> tuple[Rule, ...]:
    """Return the rules of a layer's router and experts.

    Hugging Face names: `router`.weight, `experts`.{number}.{projection}.weight.
    """
    return (
        layer_rule("mlp.router.weight", f"{router}.weight", "experts hidden", where="moe_layer"),
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


def no_attention_bias(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return no fields. Raises ValueError for `attention_bias: true`, which here includes a bias on o_proj."""
    if raw.get("attention_bias"):
        raise ValueError("attention_bias=true (a bias on o_proj) is not supported")
    return {}


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
