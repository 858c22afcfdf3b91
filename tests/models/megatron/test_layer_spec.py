"""Own RMSNorm and packed attention against the plain formulas."""

# ruff: noqa: E402  # the platform comes before Megatron

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import platforms

platforms.activate()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.models.megatron import layer_spec as spec
from megarl.models.megatron.delta_net import GatedDeltaNet
from megarl.models.megatron.layer_spec import PackedAttention, RMSNorm, _runs


def _config(**changes: Any) -> SimpleNamespace:
    plain = {"window_size": None, "window_attn_skip_freq": None, "context_parallel_size": 1,
             "params_dtype": torch.float32, "sequence_parallel": True}  # fmt: skip
    return SimpleNamespace(**plain | changes)


CONFIG = _config()


def _naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """[L, N, D] causal softmax attention in fp64, one sequence; each row sees `window` keys at most."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def _params(lengths: list[int]) -> PackedSeqParams:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    kv_heads=st.sampled_from([1, 2]),
    tail=st.integers(0, 2),
)
def test_packed_attention_is_causal_inside_each_sequence(lengths: list[int], kv_heads: int, tail: int) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths) + tail
    q = torch.randn(total, 4, 8, generator=generator)
    k, v = (torch.randn(total, kv_heads, 8, generator=generator) for _ in range(2))
    out = PackedAttention(CONFIG)(q, k, v, None, packed_seq_params=_params(lengths))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        torch.testing.assert_close(out[part].double(), _naive(q[part], k[part], v[part]), atol=1e-5, rtol=1e-5)
        start += length
    assert out.shape == (total, 32) and (out[start:] == 0).all()


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    window=st.integers(1, 30),
    block=st.sampled_from([1, 4, 7, 256]),
    size=st.sampled_from([(8, 8), (8, 5)]),
)
def test_the_window_slides_inside_each_sequence(
    lengths: list[int], window: int, block: int, size: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (torch.randn(sum(lengths), n, d, generator=generator) for n, d in zip((4, 2, 2), (8, *size), strict=True))
    spec._band.cache_clear()
    with patch.object(spec, "WINDOW_BLOCK", block):
        attention = PackedAttention(_config(window_size=(window - 1, 0)))
        out = attention(q, k, v, None, packed_seq_params=_params(lengths))
    spec._band.cache_clear()
    expected = [_naive(*parts, window) for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_gradients_through_a_window_equal_the_plain_mask() -> None:
    length, window = 300, 17  # more than one block
    q, k, v = (torch.randn(length, 2, 8, requires_grad=True) for _ in range(3))
    weights = torch.randn(length, 16)
    windowed = PackedAttention(_config(window_size=(window - 1, 0)))
    out = windowed(q, k, v, None, packed_seq_params=_params([length]))
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((_naive(q, k, v, window) * weights.double()).sum(), (q, k, v))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_gradients_stay_inside_their_sequence() -> None:
    q, k, v = (torch.randn(7, 2, 4, requires_grad=True) for _ in range(3))
    out = PackedAttention(CONFIG)(q, k, v, None, packed_seq_params=_params([3, 4]))
    out[3:].sum().backward()
    assert v.grad is not None
    assert (v.grad[:3] == 0).all() and (v.grad[3:].abs().sum((1, 2)) > 0).all()


def test_unpacked_equals_packed() -> None:
    q, k, v = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 2, 8), torch.randn(5, 2, 2, 8)
    out = PackedAttention(CONFIG)(q, k, v, None)
    assert out.shape == (5, 2, 32)
    for b in range(2):
        torch.testing.assert_close(out[:, b].double(), _naive(q[:, b], k[:, b], v[:, b]), atol=1e-5, rtol=1e-5)


def test_equal_neighbours_are_one_batch() -> None:
    assert _runs([0, 3, 6, 6, 9, 10]) == [(3, 3), (1, 1)]


def test_no_sequence_has_a_gradient_of_the_size_of_the_batch() -> None:
    """The backward pass of a slice makes one, so that the time would grow with the square of the sequences."""
    q, k, v = (torch.randn(10, 2, 4, requires_grad=True) for _ in range(3))
    out = PackedAttention(CONFIG)(q, k, v, None, packed_seq_params=_params([3, 4, 2]))
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
    names = {type(node).__name__ for node in seen}
    assert not any(name.startswith("Slice") for name in names)
    assert "SplitWithSizesBackward0" in names  # so the nodes that touch the batch were visited


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_formula(dtype: torch.dtype) -> None:
    norm = RMSNorm(_config(params_dtype=dtype), 16, eps=1e-2)
    torch.nn.init.normal_(norm.weight)
    x = (0.1 * torch.randn(3, 1, 16)).to(dtype)
    expected = (x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()).to(dtype) * norm.weight
    torch.testing.assert_close(norm(x), expected)
    assert norm(x).dtype == dtype and norm.weight.sequence_parallel is True


@pytest.mark.parametrize(
    ("capability", "dtype", "flash_attn", "changes", "own"),
    [
        ((9, 0), torch.bfloat16, False, {}, False),
        ((9, 0), torch.float32, True, {}, True),
        ((8, 0), torch.bfloat16, False, {}, True),
        ((8, 0), torch.bfloat16, True, {}, False),
        ((9, 0), torch.bfloat16, False, {"context_parallel_size": 2}, False),
        ((9, 0), torch.bfloat16, False, {"window_size": (4, 0)}, False),
        ((9, 0), torch.bfloat16, False, {"context_parallel_size": 2, "window_size": (4, 0)}, True),
    ],
)
def test_packed_sequences_get_a_kernel_where_transformer_engine_has_none(
    capability: tuple[int, int], dtype: torch.dtype, flash_attn: bool, changes: dict[str, Any], own: bool
) -> None:
    theirs = object()
    layers = [SimpleNamespace(submodules=SimpleNamespace(self_attention=SimpleNamespace(submodules=SimpleNamespace(
        core_attention=theirs)))) for _ in range(2)]  # fmt: skip
    block, found = SimpleNamespace(layer_specs=layers), object() if flash_attn else None
    with (
        patch.object(torch.cuda, "get_device_capability", lambda: capability),
        patch.object(spec.importlib.util, "find_spec", lambda name: found),
        patch.object(spec, "get_gpt_decoder_block_spec", lambda *args, **kwargs: block),
    ):
        spec._engine_block(SimpleNamespace(mla=None, delta=None), _config(params_dtype=dtype, **changes), None)  # type: ignore[arg-type]
    chosen = {layer.submodules.self_attention.submodules.core_attention for layer in layers}
    assert chosen == {PackedAttention if own else theirs}


def test_layers_of_transformer_engine_become_delta_nets_although_all_have_one_spec() -> None:
    shared = get_gpt_layer_local_spec()
    attention, norm = shared.submodules.self_attention, shared.submodules.input_layernorm
    block = SimpleNamespace(layer_specs=[shared] * 4)
    info: Any = SimpleNamespace(
        mla=None, delta="sizes", zero_centered_norms=True, is_delta_layer=lambda layer: layer % 4 != 3
    )
    with (
        patch.object(spec, "get_gpt_decoder_block_spec", lambda *args, **kwargs: block),
        patch.object(spec, "get_transformer_layer_offset", lambda *args, **kwargs: 2),
        patch.object(spec, "_has_packed_kernel", lambda config: True),
    ):
        layers = spec._engine_block(info, _config(), None).layer_specs  # type: ignore[arg-type]
    assert [layer.submodules.self_attention is attention for layer in layers] == [False, True, False, False]
    assert [layer.submodules.input_layernorm is norm for layer in layers] == [False, True, False, False]
    assert layers[0].submodules.self_attention.module is GatedDeltaNet


@pytest.mark.parametrize("window", [None, 5])
def test_key_heads_are_repeated_where_no_kernel_takes_groups(window: int | None) -> None:
    """On CUDA in fp32 or with a mask, where torch would keep all scores; the result is the same."""
    q, k, v = torch.randn(16, 4, 8), torch.randn(16, 2, 8), torch.randn(16, 2, 8)
    attention = PackedAttention(_config(window_size=None if window is None else (window - 1, 0)))
    expected = attention(q, k, v, packed_seq_params=_params([7, 9]))
    with patch.object(spec, "_takes_groups", lambda queries, *, masked: False):
        torch.testing.assert_close(attention(q, k, v, packed_seq_params=_params([7, 9])), expected)
    for dtype, masked, cuda, takes in (
        (torch.bfloat16, False, True, True), (torch.bfloat16, True, True, False), (torch.float32, False, True, False),
        (torch.float32, True, False, True),
    ):  # fmt: skip
        queries: Any = SimpleNamespace(dtype=dtype, is_cuda=cuda)
        assert spec._takes_groups(queries, masked=masked) is takes
