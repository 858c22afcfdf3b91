"""The gated delta rule against its definition, in fp64, and against that of `transformers`."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from megarl.models.megatron.delta_rule import causal_conv, gated_delta_rule

BOUNDS = [0, 70, 71, 200, 203, 203, 331]  # one token, three chunks, an empty sequence
GROUPS, HEADS, KEY, VALUE = 2, 6, 8, 12
Inputs = tuple[torch.Tensor, ...]


def inputs(dtype: torch.dtype, tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    sizes = ((GROUPS, KEY), (GROUPS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
    q, k, v, a, b = (torch.randn(tokens, *size, generator=generator, dtype=dtype) for size in sizes)
    return tuple(x.requires_grad_() for x in (q, k, v, -functional.softplus(a), b.sigmoid()))


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, token by token."""
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HEADS // GROUPS, 1) for x in (q, k)
    )
    out = [v[:0]]
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv,h->hkv", k[t], error, beta[t])
        out.append(torch.einsum("hkv,hk->hv", state, q[t])[None] / KEY**0.5)
    return torch.cat(out), state


@pytest.mark.parametrize("begins", ["from nothing", "from states"])
def test_values_states_and_gradients_are_those_of_the_definition(begins: str) -> None:
    made = inputs(torch.float64, BOUNDS[-1])
    states = torch.zeros(len(BOUNDS) - 1, HEADS, KEY, VALUE, dtype=torch.float64)
    if begins == "from states":
        states.normal_(generator=torch.Generator().manual_seed(1))
    states.requires_grad_()
    parts = [
        definition(*(x[start:stop] for x in made), state)  # type: ignore[arg-type]
        for (start, stop), state in zip(pairwise(BOUNDS), states, strict=True)
    ]
    expected = torch.cat([out for out, _ in parts]), torch.stack([state for _, state in parts])
    ours = gated_delta_rule(*made, BOUNDS, states if begins == "from states" else None)  # type: ignore[arg-type]
    leaves = (*made, states) if begins == "from states" else made
    for a, b in zip(
        (*ours, *torch.autograd.grad(sum((x * x).sum() for x in ours), leaves)),  # type: ignore[arg-type]
        (*expected, *torch.autograd.grad(sum((x * x).sum() for x in expected), leaves)),  # type: ignore[arg-type]
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-11 * b.abs().max()


def test_each_sequence_is_that_of_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    q, k, v, g, beta = (x.detach() for x in inputs(torch.float32, BOUNDS[-1]))
    ours, _ = gated_delta_rule(q, k, v, g, beta, BOUNDS)
    for start, stop in pairwise(BOUNDS):
        if start == stop:
            continue
        wide = (x[None, start:stop].repeat_interleave(HEADS // GROUPS, 2) for x in (q, k))
        own = (x[None, start:stop] for x in (v, g, beta))
        theirs, _ = torch_chunk_gated_delta_rule(*wide, *own, use_qk_l2norm_in_kernel=True)
        assert (ours[start:stop] - theirs[0]).abs().max() <= 1e-5


def test_tokens_beyond_the_last_sequence_get_zeros_and_no_gradient() -> None:
    made = inputs(torch.float64, BOUNDS[-1] + 5)
    out, _ = gated_delta_rule(*made, BOUNDS)  # type: ignore[arg-type]
    assert not out[BOUNDS[-1] :].any()
    for gradient in torch.autograd.grad(out.sum(), made):
        assert gradient[: BOUNDS[-1]].any() and not gradient[BOUNDS[-1] :].any()


def test_a_sequence_goes_on_from_its_state() -> None:
    """As an engine does: a part of the prompt, the rest, and then token by token."""
    q, k, v, g, beta = (x.detach() for x in inputs(torch.float64, 100))
    whole, last = gated_delta_rule(q, k, v, g, beta, [0, 100])
    parts, state = [], None
    for start, stop in ((0, 41), (41, 97), (97, 98), (98, 99), (99, 100)):
        out, state = gated_delta_rule(*(x[start:stop] for x in (q, k, v, g, beta)), [0, stop - start], state)
        parts.append(out)
    assert state is not None
    assert (torch.cat(parts) - whole).abs().max() <= 1e-13
    assert (state - last).abs().max() <= 1e-13


def test_the_convolution_sees_no_other_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BOUNDS[-1] + 2, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    before = torch.randn(len(BOUNDS) - 1, 3, 5, generator=generator, dtype=torch.float64)
    for held in (None, before):
        ours = causal_conv(x, weight, BOUNDS, held)
        for i, (start, stop) in enumerate(pairwise(BOUNDS)):
            past = torch.zeros_like(before[i]) if held is None else before[i]
            padded = torch.cat([past, x[start:stop]]).T[None]
            if start < stop:
                expected = functional.conv1d(padded, weight[:, None], groups=5)[0].T
                assert (ours[start:stop] - expected).abs().max() <= 1e-14
