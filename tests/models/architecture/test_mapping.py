"""The mapping rules as pure arithmetic: shards partition the sources exactly, for any shape and TP."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.architecture.architecture import LatentAttention, ModelInfo
from megarl.models.architecture.mapping import Entry, Rule, Source, canonical_name, expand
from megarl.models.families import FAMILIES
from megarl.models.megatron.shards import table

INFO = ModelInfo(
    family="qwen3_moe",
    num_layers=3,
    hidden=8,
    ffn=24,
    heads=8,
    kv_heads=2,
    head_dim=4,
    vocab_size=13,
    tied=False,
    qkv_bias=True,
    qk_norm=True,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    max_positions=64,
    num_experts=4,
    topk=2,
    moe_ffn=16,
    moe_layers=(True, False, True),
)


def _entries(info: ModelInfo) -> dict[str, Entry]:
    return {entry.megatron: entry for entry in expand(FAMILIES[info.family].rules, info)}


def _full_megatron(entry: Entry, sources: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    axis = entry.rule.axis or 0
    shape = list(entry.shapes[0])
    parts = []
    for piece in entry.pieces(rank, size):
        if piece.source is None:
            shape[axis] = piece.size
            parts.append(torch.full(shape, -1.0))
        else:
            parts.append(sources[piece.source].narrow(axis, piece.start, piece.size))
    return torch.cat(parts, axis)


def _sources(entry: Entry) -> list[torch.Tensor]:
    return [
        torch.arange(torch.Size(shape).numel()).float().view(shape) + 1e4 * i for i, shape in enumerate(entry.shapes)
    ]


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    per_group=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([2, 4, 8]),
    vocab=st.integers(1, 40),
    size=st.sampled_from([1, 2, 4, 8]),
)
def test_shards_partition_every_source(kv_heads: int, per_group: int, head_dim: int, vocab: int, size: int) -> None:
    info = replace(INFO, kv_heads=kv_heads, heads=kv_heads * per_group, head_dim=head_dim, vocab_size=vocab)
    for entry in _entries(info).values():
        axis = entry.rule.axis
        covered = [torch.zeros(shape[axis or 0], dtype=torch.int) for shape in entry.shapes]
        try:
            shards = [entry.pieces(rank, size) for rank in range(size)]
        except ValueError as error:
            assert "not divisible" in str(error)
            continue
        for rank, pieces in enumerate(shards):
            assert sum(piece.size for piece in pieces) == entry.shard_shape(rank, size)[axis or 0]
            for piece in pieces:
                if piece.source is not None:
                    covered[piece.source][piece.start : piece.stop] += 1
        expected = 1 if axis is not None else size
        assert all((counts == expected).all() for counts in covered)
        if axis is not None:
            assert len({entry.shard_shape(rank, size) for rank in range(size)}) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_qkv_is_grouped_and_cut_like_megatron(size: int) -> None:
    entry = _entries(INFO)["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = _sources(entry)
    groups, d = INFO.kv_heads, INFO.head_dim
    full = torch.cat([q.view(groups, -1, 8), k.view(groups, d, 8), v.view(groups, d, 8)], 1).reshape(-1, 8)
    for rank, chunk in enumerate(full.chunk(size)):
        assert torch.equal(_full_megatron(entry, [q, k, v], rank, size), chunk)


def test_gate_and_up_are_cut_each() -> None:
    entry = _entries(INFO)["decoder.layers.1.mlp.linear_fc1.weight"]
    gate, up = _sources(entry)
    for rank in range(4):
        expected = torch.cat([gate.chunk(4)[rank], up.chunk(4)[rank]])
        assert torch.equal(_full_megatron(entry, [gate, up], rank, 4), expected)


def test_vocabulary_is_padded_at_its_end_only() -> None:
    entry = _entries(INFO)["output_layer.weight"]
    (weight,) = _sources(entry)
    full = torch.cat([_full_megatron(entry, [weight], rank, 4) for rank in range(4)])
    assert full.shape == (16, 8)
    assert torch.equal(full[:13], weight) and (full[13:] == -1).all()


def test_a_shape_that_does_not_divide_names_the_parameter() -> None:
    info = replace(INFO, ffn=9)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.linear_fc1\.weight: 9 rows are not divisible"):
        _entries(info)["decoder.layers.1.mlp.linear_fc1.weight"].pieces(0, 2)


def test_layer_order_and_kinds() -> None:
    names = list(_entries(INFO))
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]
    assert "decoder.layers.0.mlp.router.weight" in names and "decoder.layers.0.mlp.linear_fc1.weight" not in names
    assert "decoder.layers.1.mlp.linear_fc1.weight" in names and "decoder.layers.1.mlp.router.weight" not in names
    assert "output_layer.weight" not in _entries(replace(INFO, tied=True))
    assert not any("bias" in name for name in _entries(replace(INFO, qkv_bias=False)))
    assert sum("local_experts" in name for name in names) == 2 * 4 * 2


_UP = "model.layers.{layer}.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Rule("decoder.layers.{layer}.mlp.linear_fc2.weight", (Source("other.{layer}", "hidden ffn"),), 1),
            r"two rules make decoder\.layers\.1\.mlp\.linear_fc2\.weight$",
        ),
        (
            Rule("decoder.layers.{layer}.mlp.another.weight", (Source(_UP, "ffn hidden"),), 0),
            r"layers\.1\.mlp\.up_proj\.weight is mapped twice, in .*1\.mlp\.linear_fc1\.weight and "
            r"decoder\.layers\.1\.mlp\.another\.weight$",
        ),
        (
            Rule("decoder.layers.{layer}.mlp.another.weight", (Source("x", "hidden"), Source("x", "hidden")), 0),
            r"x is mapped twice, in decoder\.layers\.1\.mlp\.another\.weight$",
        ),
        (
            Rule("decoder.another.weight", (Source("model.embed_tokens.weight", "vocab hidden"),)),
            r"embed_tokens\.weight is mapped twice, in embedding\.word_embeddings\.weight and decoder\.another",
        ),
    ],
)
def test_what_is_mapped_twice_is_named(rule: Rule, message: str) -> None:
    family = FAMILIES["qwen3_moe"]
    rule = replace(rule, where="dense_layer" if "{layer}" in rule.megatron else "model")
    assert list(table(INFO)) == list(_entries(INFO))
    with (
        patch.dict(FAMILIES, qwen3_moe=replace(family, rules=(*family.rules, rule))),
        pytest.raises(ValueError, match=message),
    ):
        table(INFO)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.5.mlp.linear_fc2.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            "decoder.layers.2.mlp.experts.local_experts.9.linear_fc1.weight",
        ),
        # Transformer Engine's names
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight1",
            "decoder.layers.2.mlp.experts.local_experts.9.linear_fc2.weight",
        ),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.2.input_layernorm.weight",
        ),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
        ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
            "decoder.layers.2.self_attention.q_layernorm.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.5.self_attention.kv_layernorm.weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            "decoder.layers.5.self_attention.linear_qkv.weight",
        ),
    ],
)
def test_canonical_names(name: str, canonical: str) -> None:
    assert canonical_name(name, {0: 2, 1: 5}, first_expert=8) == canonical


def test_every_norm_of_latent_attention_has_a_rule_under_transformer_engines_names() -> None:
    """The names that its modules have there; without a pattern a load ends with "no rule of family deepseek_v3"."""
    info = replace(
        INFO,
        family="deepseek_v3",
        kv_heads=INFO.heads,
        qk_norm=False,
        qkv_bias=False,
        mla=LatentAttention(query_rank=8, kv_rank=8, plain=4, rotated=4, value=4, norm_eps=1e-6),
    )
    rules = table(info)
    for made in ("linear_q_up_proj", "linear_kv_up_proj"):
        name = f"decoder.layers.0.self_attention.{made}.layer_norm_weight"
        assert canonical_name(name, {0: 1}, first_expert=0) in rules
