"""Wrong mapping rules and wrong architecture numbers: each must move the log-probs of a loaded model.

`MUTATIONS` are the mistakes that one might make; `reversed_logprobs` breaks any rule, so that none goes unseen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry, Piece
from megarl.models.families import FAMILIES
from megarl.models.hf.load import load_hf_weights
from megarl.models.hf.read_config import load_info as read_info
from megarl.models.megatron import shards
from tests.support.ranks.models import models
from tests.support.ranks.models.layouts import make_layout, use_layout

TP2 = {"tensor": 2, "sequence": True}


@dataclass(frozen=True)
class Mutation:
    name: str
    model: str  # of family_models.MODELS
    entry: Callable[[Entry], Entry] = lambda entry: entry
    info: Callable[[ModelInfo], ModelInfo] = lambda info: info
    loaded: Callable[[str, torch.Tensor], None] = lambda name, parameter: None  # of each parameter, after the load
    sizes: dict[str, Any] = field(default_factory=lambda: dict(TP2))


def _rule(pattern: str, **changes: Any) -> Callable[[Entry], Entry]:
    def mutate(entry: Entry) -> Entry:
        return replace(entry, rule=replace(entry.rule, **changes)) if re.search(pattern, entry.megatron) else entry

    return mutate


def _order(pattern: str, *order: int) -> Callable[[Entry], Entry]:
    def mutate(entry: Entry) -> Entry:
        if not re.search(pattern, entry.megatron):
            return entry
        return replace(entry, names=tuple(entry.names[i] for i in order), shapes=tuple(entry.shapes[i] for i in order))

    return mutate


def _swap(one: str, other: str) -> Callable[[Entry], Entry]:
    """Exchange two Hugging Face names everywhere."""

    def rename(name: str) -> str:
        return name.replace(one, "\0").replace(other, one).replace("\0", other)

    return lambda entry: replace(entry, names=tuple(map(rename, entry.names)))


def _shift_experts(entry: Entry) -> Entry:
    def shift(name: str) -> str:
        return re.sub(r"experts\.(\d+)", lambda m: f"experts.{(int(m[1]) + 1) % (entry.info.num_experts or 1)}", name)

    return replace(entry, names=tuple(map(shift, entry.names)))


def _reversed_rows(info: ModelInfo) -> list[Piece]:
    count = info.num_experts or 0
    return [Piece(0, i, i + 1) for i in reversed(range(count))]


def _reversed_groups(info: ModelInfo) -> list[Piece]:
    rows = info.heads // info.kv_heads * info.head_dim
    result = []
    for g in reversed(range(info.kv_heads)):
        result += [Piece(0, g * rows, (g + 1) * rows)]
        result += [Piece(i, g * info.head_dim, (g + 1) * info.head_dim) for i in (1, 2)]
    return result


def _rope(**changes: Any) -> Callable[[ModelInfo], ModelInfo]:
    return lambda info: replace(info, rope_scaling={**(info.rope_scaling or {}), **changes})


def _mla(**changes: Any) -> Callable[[ModelInfo], ModelInfo]:
    return lambda info: replace(info, mla=replace(info.mla, **changes))


def _reversed(symbol: str) -> Callable[[ModelInfo], list[Piece]]:
    """Every row (or column) of a single source, last first."""
    return lambda info: [Piece(0, i, i + 1) for i in reversed(range(info.dims[symbol]))]


def _rotated(symbol: str, by: int) -> Callable[[ModelInfo], list[Piece]]:
    """Rows of a single source from `by` on, then those before: heads keep their size and get others' rows."""
    return lambda info: [Piece(0, by, info.dims[symbol]), Piece(0, 0, by)]


def _deinterleaved(symbol: str) -> Callable[[ModelInfo], list[Piece]]:
    """The last 8 rows (the shared rotated key): even ones first, as if Megatron did not read pairs."""

    def arrange(info: ModelInfo) -> list[Piece]:
        first = info.dims[symbol] - 8
        order = [*range(first, first + 8, 2), *range(first + 1, first + 8, 2)]
        return [Piece(0, 0, first), *(Piece(0, i, i + 1) for i in order)]

    return arrange


def _head_of_other_rows(name: str, parameter: torch.Tensor) -> None:
    """The copy of the embedding in the last pipeline stage has each row at the next token: it is no longer tied."""
    if name == shards.TIED_COPY:
        parameter.copy_(parameter.roll(1, 0))


DEEPSEEK = "deepseek_v3"
_MLA = {
    "query-norm-order": _rule(r"q_layernorm", arrange=_reversed("q_rank")),
    "query-down-order": _rule(r"linear_q_down", arrange=_reversed("q_rank")),
    "query-up-plain-rotated-order": _rule(r"linear_q_up", arrange=_rotated("q", 8)),
    "query-heads-rotated": _rule(r"linear_q_up", arrange=_rotated("q", 24)),
    "key-value-norm-order": _rule(r"kv_layernorm", arrange=_reversed("kv_rank")),
    "rotated-key-before-latent": _rule(r"linear_kv_down", arrange=_rotated("latent", 32)),
    "rotated-key-not-interleaved": _rule(r"linear_kv_down", arrange=_deinterleaved("latent")),
    "values-before-keys": _rule(r"linear_kv_up", arrange=_rotated("kv_up", 16)),
    "key-value-heads-rotated": _rule(r"linear_kv_up", arrange=_rotated("kv_up", 28)),
    "output-columns-rotated": _rule(r"self_attention.linear_proj", arrange=_rotated("values", 12)),
}
QKV, FC1 = r"linear_qkv\.weight", r"linear_fc1"

MUTATIONS = [
    Mutation("qkv-not-interleaved", "llama", _rule(QKV, arrange=None)),
    Mutation("qkv-groups-reversed", "qwen3", _rule(QKV, arrange=_reversed_groups)),
    Mutation("qkv-bias-not-interleaved", "qwen2", _rule(r"linear_qkv\.bias", arrange=None)),
    Mutation("k-and-v-swapped", "qwen3", _order(QKV, 0, 2, 1)),
    Mutation("gate-and-up-swapped", "qwen3", _order(FC1, 1, 0)),
    Mutation("gate-up-chunk-of-concatenation", "llama", _rule(FC1, per_source=False)),
    Mutation("expert-gate-and-up-swapped", "qwen3_moe", _order(r"local_experts.*fc1", 1, 0)),
    Mutation("layer-norms-swapped", "qwen2", _swap(".input_layernorm.", ".post_attention_layernorm.")),
    Mutation("final-norm-swapped", "llama", _swap("model.norm.weight", "model.layers.0.input_layernorm.weight")),
    Mutation("qk-norms-swapped", "qwen3", _swap(".q_norm.", ".k_norm.")),
    Mutation("embedding-and-head-swapped", "qwen3", _swap("model.embed_tokens.weight", "lm_head.weight")),
    Mutation("tie", "qwen2", loaded=_head_of_other_rows, sizes={"pipeline": 2}),
    Mutation("layers-swapped", "llama", _swap("layers.2.mlp", "layers.3.mlp"), sizes={"pipeline": 2}),
    Mutation("router-order", "qwen3_moe", _rule("router", arrange=_reversed_rows)),
    Mutation("expert-offset", "qwen3_moe", _shift_experts, sizes={"expert": 2}),
    Mutation("norm-topk-prob", "qwen3_moe", info=lambda info: replace(info, norm_topk_prob=False)),
    Mutation("eps", "qwen3", info=lambda info: replace(info, norm_eps=1e-5)),
    Mutation("rope-theta", "qwen3", info=lambda info: replace(info, rope_theta=2e5)),
    Mutation("rope-scaling-forgotten", "llama", info=lambda info: replace(info, rope_scaling=None)),
    Mutation("rope-scaling-factor", "llama", info=_rope(factor=16.0)),
    Mutation("rope-scaling-low-frequency", "llama", info=_rope(low_freq_factor=2.0)),
    Mutation("rope-scaling-high-frequency", "llama", info=_rope(high_freq_factor=8.0)),
    Mutation("rope-scaling-context", "llama", info=_rope(original_max_position_embeddings=8192)),
    Mutation("llama2-eps", "llama2", info=lambda info: replace(info, norm_eps=1e-6)),
    Mutation("yarn-forgotten", "qwen2_yarn", info=lambda info: replace(info, rope_scaling=None)),
    Mutation("yarn-is-linear", "qwen2_yarn", info=_rope(rope_type="linear")),
    Mutation("yarn-attention-factor-forgotten", "qwen2_yarn", info=_rope(attention_factor=1.0)),
    Mutation("yarn-attention-factor-ignored", "qwen3_yarn", info=_rope(attention_factor=None)),
    Mutation("yarn-mscale", "qwen2_yarn", info=_rope(mscale=2.0, mscale_all_dim=1.0)),
    Mutation("yarn-factor", "qwen3_yarn", info=_rope(factor=4.0)),
    Mutation("yarn-context", "qwen2_yarn", info=_rope(original_max_position_embeddings=512)),
    Mutation("yarn-beta-fast", "qwen3_yarn", info=_rope(beta_fast=None)),
    Mutation("yarn-beta-slow", "qwen3_yarn", info=_rope(beta_slow=None)),
    Mutation("yarn-truncate", "qwen3_yarn", info=_rope(truncate=True)),
    Mutation("window-forgotten", "mistral", info=lambda info: replace(info, window=None)),
    Mutation("window-one-wider", "mistral", info=lambda info: replace(info, window=14)),
    Mutation("window-one-narrower", "mistral", info=lambda info: replace(info, window=12)),
    Mutation("mixtral-gate-and-up-swapped", "mixtral", _order(r"local_experts.*fc1", 1, 0)),
    Mutation("mixtral-router-order", "mixtral", _rule("router", arrange=_reversed_rows)),
    Mutation("mixtral-expert-offset", "mixtral", _shift_experts, sizes={"expert": 2}),
    Mutation("mixtral-not-renormalised", "mixtral", info=lambda info: replace(info, norm_topk_prob=False)),
    Mutation("mixtral-topk", "mixtral", info=lambda info: replace(info, topk=3)),
    *(Mutation(f"mla-{name}", DEEPSEEK, entry) for name, entry in _MLA.items()),
    Mutation("mla-norm-eps", "moonlight", info=_mla(norm_eps=1e-3)),
    Mutation("mla-layer-norm-eps", "moonlight", info=lambda info: replace(info, norm_eps=1e-6)),
    Mutation("mla-rope-theta", "moonlight", info=lambda info: replace(info, rope_theta=1e4)),
    Mutation("mla-yarn-forgotten", DEEPSEEK, info=lambda info: replace(info, rope_scaling=None)),
    Mutation("mla-yarn-factor", DEEPSEEK, info=_rope(factor=8.0)),
    Mutation("mla-yarn-context", DEEPSEEK, info=_rope(original_max_position_embeddings=512)),
    Mutation("mla-yarn-beta-fast", DEEPSEEK, info=_rope(beta_fast=None)),
    Mutation("mla-yarn-beta-slow", DEEPSEEK, info=_rope(beta_slow=None)),
    Mutation("mla-yarn-mscale", DEEPSEEK, info=_rope(mscale=0.7)),
    Mutation("mla-yarn-mscale-all-dim", DEEPSEEK, info=_rope(mscale_all_dim=1.0)),
    Mutation("mla-yarn-mscale-forgotten", DEEPSEEK, info=_rope(mscale=None, mscale_all_dim=None)),
    Mutation("group-limit-forgotten", DEEPSEEK, info=lambda info: replace(info, router_groups=None)),
    Mutation("group-number", DEEPSEEK, info=lambda info: replace(info, router_groups=(2, 1))),
    Mutation("group-topk", DEEPSEEK, info=lambda info: replace(info, router_groups=(4, 4))),
    Mutation("router-scale", DEEPSEEK, info=lambda info: replace(info, router_scale=1.0)),
    Mutation("expert-bias-order", DEEPSEEK, _rule("expert_bias", arrange=_reversed_rows)),
    Mutation("deepseek-router-order", DEEPSEEK, _rule("router.weight", arrange=_reversed_rows)),
    Mutation("deepseek-expert-offset", DEEPSEEK, _shift_experts, sizes={"expert": 2}),
    Mutation("shared-gate-and-up-swapped", DEEPSEEK, _order(r"shared_experts.*fc1", 1, 0)),
    Mutation("shared-chunk-of-concatenation", DEEPSEEK, _rule(r"shared_experts.*fc1", per_source=False)),
    Mutation("shared-columns-reversed", DEEPSEEK, _rule(r"shared_experts.*fc2", arrange=_reversed("shared_ffn"))),
]


def mutated_logprobs(
    model_dir: str, batch: list[list[list[int]]], mutation: str, **sizes: Any
) -> list[torch.Tensor] | None:
    """Return what `models.logprobs` does, with one rule broken."""
    chosen = next(each for each in MUTATIONS if each.name == mutation)

    def load_info(path: str) -> ModelInfo:
        return chosen.info(read_info(path))

    @torch.no_grad()
    def load_weights(chunks: Any, *arguments: Any) -> None:
        load_hf_weights(chunks, *arguments)
        for name, parameter in (each for chunk in chunks for each in chunk.named_parameters()):
            chosen.loaded(name, parameter)

    loading = patch.multiple(models, load_info=load_info, load_hf_weights=load_weights)
    with _expanding(chosen.entry), loading:
        return models.logprobs(model_dir, batch, **sizes)


def _expanding(mutate: Callable[[Entry], Entry]) -> Any:
    """Every table made inside has its entries mutated."""
    original = shards.expand

    def expand(rules: Any, info: ModelInfo) -> Iterator[Entry]:
        return map(mutate, original(rules, info))

    return patch.object(shards, "expand", expand)


def active_rules(info: ModelInfo) -> list[str]:
    """Megatron name templates of the rules that this model is made by, in the order of the family's table."""
    return list(dict.fromkeys(entry.rule.megatron for entry in shards.expand(FAMILIES[info.family].rules, info)))


def _last_first(rule: str) -> Callable[[Entry], Entry]:
    """Rows (or columns, where tensor parallelism cuts them) of what one rule makes, last first."""

    def mutate(entry: Entry) -> Entry:
        if entry.rule.megatron != rule:
            return entry
        rows = [Piece(p.source, i, i + 1) for p in entry.pieces(0, 1) for i in range(p.start, p.stop)]
        broken = replace(entry.rule, arrange=lambda info: rows[::-1], per_source=False, pad_to_tp=False)
        return replace(entry, rule=broken)

    return mutate


def reversed_logprobs(model_dir: str, batch: list[list[list[int]]], rules: list[str]) -> dict[str, list[torch.Tensor]]:
    """Log-probs of the batch with each of `rules` broken in turn, on whole models; ranks share the rules."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layout, answers = make_layout(), {}
    with use_layout(layout):
        for rule in rules[rank::size]:
            with _expanding(_last_first(rule)):
                info, _, chunks = models.load(model_dir, layout)
            answer = models.forward_logprobs(info, layout, chunks, batch)
            assert answer is not None
            answers[rule] = answer
    return answers
