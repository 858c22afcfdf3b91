"""RMSNorm, SwiGLU and RoPE of a CPU have the values and gradients of their formulas."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from megarl.common.errors import InstallationError
from megarl.platforms import cpu_kernels
from megarl.platforms.cpu_kernels import VARIABLE, rms_norm, rope, swiglu_back
from tests.support.checkout import ROOT, environment
from tests.support.models.family_models import family_models, make_batch
from tests.support.worlds.world import World

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is for machines without CUDA")
SEEDS = st.integers(0, 2**16)


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(SEEDS, st.sampled_from([(), (3,), (2, 1, 4)]), st.integers(1, 40), st.sampled_from([1e-6, 0.5]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_norm_and_its_gradients_are_those_of_finite_differences(
    seed: int, axes: tuple[int, ...], channels: int, eps: float, is_slice: bool
) -> None:
    whole = _random(*axes, channels + is_slice, seed=seed)
    inputs = whole[..., :channels].requires_grad_()  # of a query in the product for queries, keys and values
    weight = _random(channels, seed=seed + 1).requires_grad_()
    expected = functional.rms_norm(inputs, (channels,), weight, eps)
    assert torch.allclose(rms_norm(inputs, weight, eps), expected, rtol=1e-12, atol=1e-12)
    gradient = _random(*expected.shape, seed=seed + 2)
    found = torch.autograd.grad(rms_norm(inputs, weight, eps), (inputs, weight), gradient)
    for one, other in zip(found, torch.autograd.grad(expected, (inputs, weight), gradient), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_the_norm_in_single_precision_is_as_close_as_torchs() -> None:
    inputs, weight = _random(500, 128, seed=0), _random(128, seed=1)
    gradient = _random(500, 128, seed=2)

    def run(norm: object, dtype: torch.dtype) -> list[Tensor]:
        x, w = (each.to(dtype).detach().requires_grad_() for each in (inputs, weight))
        y = norm(x, w)  # type: ignore[operator]
        return [y.detach(), *torch.autograd.grad(y, (x, w), gradient.to(dtype))]

    def torchs(x: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(x, (128,), w, 1e-6)

    exact = run(torchs, torch.float64)
    mine, other = (
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(run(norm, torch.float32), exact, strict=True)]
        for norm in (lambda x, w: rms_norm(x, w, 1e-6), torchs)
    )
    assert all(one <= max(2 * two, 1e-6) for one, two in zip(mine, other, strict=True)), (mine, other)


@given(SEEDS, st.sampled_from([(1,), (5,), (3, 1)]), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_the_gradient_of_swiglu_is_that_of_its_formula_to_the_last_bit(
    seed: int, axes: tuple[int, ...], half: int
) -> None:
    inputs = _random(*axes, 2 * half, seed=seed, dtype=torch.float32).requires_grad_()
    gate, up = inputs.chunk(2, -1)
    result = functional.silu(gate) * up
    gradient = _random(*result.shape, seed=seed + 1, dtype=torch.float32)
    (expected,) = torch.autograd.grad(result, inputs, gradient)
    assert torch.equal(swiglu_back(gradient, inputs.detach()), expected)


@given(SEEDS, st.integers(1, 6), st.integers(1, 8), st.sampled_from([1.0, 1.3]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_rope_rotates_each_pair_of_channels_by_its_own_angle(
    seed: int, tokens: int, pairs: int, factor: float, is_same: bool
) -> None:
    angles = 3 * _random(tokens, 1, 1, pairs, seed=seed)
    other = angles if is_same else _random(tokens, 1, 1, pairs, seed=seed + 9)
    inputs = _random(tokens, 1, 2, 2 * pairs, seed=seed + 1).requires_grad_()
    first, second = inputs.chunk(2, -1)
    expected = factor * torch.cat(
        (first * angles.cos() - second * angles.sin(), second * other.cos() + first * other.sin()), -1
    )
    result = rope(inputs, torch.cat((angles, other), -1), factor)
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)
    gradient = _random(*result.shape, seed=seed + 2)
    (found,) = torch.autograd.grad(result, inputs, gradient)
    assert torch.allclose(found, torch.autograd.grad(expected, inputs, gradient)[0], rtol=1e-12, atol=1e-12)


PROGRAM = """
import torch
from megarl import platforms
platforms.activate()
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding
from megarl.platforms import cpu_kernels as cpu_elementwise
counts = {"rope": 0, "swiglu": 0}
original = cpu_elementwise.rope
def counted(*args):
    counts["rope"] += 1
    return original(*args)
cpu_elementwise.rope = counted
apply = rope_utils._apply_rotary_pos_emb_bshd
t, angles = torch.randn(3, 1, 2, 8), torch.randn(3, 1, 1, 8)
angles[..., 4:] = angles[..., :4]
plain = apply(t, angles)
part = apply(t, angles[..., [0, 1, 4, 5]])  # half of the channels stay as they are
apply(t, angles, rotary_interleaved=True), apply(t, angles, multi_latent_attention=True)
assert torch.equal(part[..., 4:], t[..., 4:]) and not torch.equal(part[..., :4], t[..., :4])
first, second = t.chunk(2, -1)
a = angles[..., :4]
expected = torch.cat((first * a.cos() - second * a.sin(), second * a.cos() + first * a.sin()), -1)
assert torch.allclose(plain, expected, atol=1e-6)
assert torch.allclose(apply(t, angles, mscale=1.3), 1.3 * expected, atol=1e-6)
assert rotary_pos_embedding._apply_rotary_pos_emb_bshd is apply  # it has imported the name
counts["swiglu"] = int(fused_bias_swiglu.swiglu_back is cpu_elementwise.swiglu_back)
print(counts["rope"], counts["swiglu"], int(cpu_elementwise.enabled()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, "torch"])
def test_megatron_uses_them_unless_it_is_told_not_to(chosen: str | None) -> None:
    """Plain RoPE over all channels is ours, every other kind Megatron-Core's. In a process of its own: it patches."""
    env = {name: value for name, value in environment().items() if name != VARIABLE}
    if chosen is not None:
        env[VARIABLE] = chosen
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["2", "1", "1"] if chosen is None else ["0", "0", "0"])


def _module(function: Callable[..., Tensor]) -> ModuleType:
    module = ModuleType("megatron.core.a_module")
    module.name = function  # type: ignore[attr-defined]
    return module


def test_a_function_of_megatron_that_has_changed_is_refused() -> None:
    """Otherwise it would be replaced without an effect, or called without the new tensor."""

    def replace(function: Callable[..., Tensor], name: str = "name") -> ModuleType:
        module = _module(function)
        cpu_kernels._replace(module, name, ("g", "y"), lambda original: swiglu_back, options=("scale",))
        return module

    assert replace(lambda g, y, flag=False, scale=1.0: g).name is swiglu_back
    for changed, name in (
        (lambda g, y, scale=1.0: g, "gone"),
        (lambda g, y: g, "name"),
        (lambda y, g, scale=1.0: g, "name"),
        (lambda g, y, weights, scale=1.0: g, "name"),
    ):
        with pytest.raises(InstallationError, match=rf"a_module\.{name} of megatron-core .* is not .*{VARIABLE}=torch"):
            replace(changed, name)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return family_models(tmp_path_factory.mktemp("models"))


@pytest.mark.world
@pytest.mark.parametrize("name", ["qwen2_yarn", "qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_a_model_uses_them_in_both_passes_and_has_the_gradients_of_torchs_functions(
    name: str, precision: str, tolerance: float, world: Callable[[int], World], model_dir: Callable[[str], Path]
) -> None:
    case, micro_batch = "tests.support.ranks.models.elementwise:gradients", make_batch()[0]
    (calls, modules, found), (none, _, expected) = (
        world(1).run(case, model_dir=str(model_dir(name)), micro_batch=micro_batch, precision=precision, plain=plain)[0]
        for plain in (False, True)
    )
    assert none == {}
    norms = modules["norm"] if precision == "fp32" else 0  # in bf16 they are torch's
    assert calls.get("norm forward", 0) == calls.get("norm backward", 0) == norms
    assert calls["swiglu forward"] >= modules["mlp"] and calls["swiglu backward"] == modules["mlp"]
    ropes = 0 if name == "deepseek_v3" else 2 * modules["layers"]  # one for queries, one for keys, or for each sequence
    assert calls.get("rope forward", 0) == calls.get("rope backward", 0) and calls.get("rope forward", 0) >= ropes
    assert (ropes == 0) == ("rope forward" not in calls)
    assert found.keys() == expected.keys() and len(found) > modules["layers"]
    for parameter, gradient in found.items():
        gap = (gradient.float() - expected[parameter].float()).norm() / expected[parameter].float().norm()
        assert gap <= tolerance, (parameter, gap)
