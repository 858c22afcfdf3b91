"""RMSNorm, SwiGLU and RoPE on a CPU, with fewer passes over memory than torch's formulas.

At hidden size 128, torch 2.13 spends more than half of an update in these functions: each operation reads and writes
tensors larger than a core's caches, and each slice costs a copy in the backward pass. Here each is one autograd
function with an explicit backward pass. Values and gradients equal the formulas': SwiGLU's to the last bit, the others'
up to rounding.

`MEGARL_CPU_MATMUL=torch` keeps torch's functions, to compare runs bit for bit.

Shapes: X any axes, E normalized channels, D channels of a head, F channels of each half of a gated layer.
"""

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megarl.common.errors import InstallationError
from megarl.platforms.patches import rebind

VARIABLE = "MEGARL_CPU_MATMUL"


@functools.cache
def enabled() -> bool:
    """Return whether this module's functions are used (on a CPU)."""
    return not torch.cuda.is_available() and os.environ.get(VARIABLE) != "torch"


def install() -> None:
    """Make Megatron-Core's fused SwiGLU and its RoPE use the functions of this module; call it once.

    Raises InstallationError if one of them differs from the supported versions'.
    """
    if not enabled():
        return
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.models.common.embeddings import rope_utils

    _replace(fused_bias_swiglu, "swiglu_back", ("g", "y"), lambda original: swiglu_back)
    _replace(rope_utils, "_apply_rotary_pos_emb_bshd", ("t", "freqs"), _with_rope, options=("mscale",))


def _replace(
    module: ModuleType,
    name: str,
    tensors: tuple[str, ...],
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    options: tuple[str, ...] = (),
) -> None:
    """Replace `module.name`, and imports of it, with `make` of it.

    Its parameters must be `tensors`, then only parameters with defaults, including `options`. Without this check, a
    renamed function would silently not be replaced, and an additional tensor silently dropped.
    """
    original = getattr(module, name, None)
    parameters = {} if original is None else inspect.signature(original).parameters
    needed = tuple(key for key, each in parameters.items() if each.default is each.empty)
    if original is None or needed != tensors or not set(options) <= set(parameters):
        import megatron.core

        raise InstallationError(
            f"{module.__name__}.{name} of megatron-core {megatron.core.__version__} is not the function that megarl "
            f"replaces on a CPU. Install the locked version (`make setup`), or set {VARIABLE}=torch to use torch's "
            "functions, which are slower"
        )
    replacement = make(original)
    setattr(module, name, replacement)
    rebind(name, original, replacement)


def rms_norm(input_XE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Return input / sqrt(mean(input², over E) + eps) * weight, [X, E]. Both are float32."""
    result: Tensor = _RMSNorm.apply(input_XE, weight_E, eps)
    return result


class _Saved(Protocol):
    """The methods used of autograd's context."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Saved, input_XE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        square_X1 = torch.linalg.vector_norm(input_XE, dim=-1, keepdim=True).square_()
        scale_X1 = square_X1.div_(input_XE.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(input_XE, weight_E, scale_X1)
        return (input_XE * scale_X1).mul_(weight_E)

    @staticmethod
    def backward(ctx: _Saved, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient_XE,) = gradients
        input_XE, weight_E, scale_X1 = ctx.saved_tensors
        channels = input_XE.shape[-1]
        product_RE = (gradient_XE * input_XE).reshape(-1, channels)
        scale_R = scale_X1.reshape(-1)
        # Both sums over an axis are matrix-vector products.
        weight_gradient_E = product_RE.t().mv(scale_R)
        factor_R = product_RE.mv(weight_E).mul_(scale_R.pow(3)).div_(-channels)
        input_gradient_XE = (gradient_XE * weight_E).mul_(scale_X1)
        return input_gradient_XE.addcmul_(input_XE, factor_R.view_as(scale_X1)), weight_gradient_E, None


def swiglu_back(gradient_XF: Tensor, input_X2F: Tensor) -> Tensor:
    """Return the gradient [X, 2F] of silu(first half) * second half with respect to the input."""
    gate_XF, up_XF = input_X2F.chunk(2, -1)
    result_X2F = torch.empty_like(input_X2F)
    gate_gradient_XF, up_gradient_XF = result_X2F.chunk(2, -1)
    buffer_XF = functional.silu(gate_XF)
    torch.mul(gradient_XF, buffer_XF, out=up_gradient_XF)
    torch.mul(gradient_XF, up_XF, out=buffer_XF)
    torch.ops.aten.silu_backward.grad_input(buffer_XF, gate_XF, grad_input=gate_gradient_XF)
    return result_X2F


def rope(input_XD: Tensor, angles_XD: Tensor, factor: float = 1.0) -> Tensor:
    """Return the input with channels i and i + D/2 rotated by their angles and multiplied by `factor`, [X, D].

    `angles_XD` is broadcast, has no gradient, and may have another dtype.
    """
    cosine_XD, sine_XD = torch.cos(angles_XD), torch.sin(angles_XD)
    if factor != 1.0:
        cosine_XD, sine_XD = cosine_XD * factor, sine_XD * factor
    result: Tensor = _RoPE.apply(input_XD, cosine_XD.to(input_XD.dtype), sine_XD.to(input_XD.dtype))
    return result


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Saved, input_XD: Tensor, cosine_XD: Tensor, sine_XD: Tensor) -> Tensor:
        ctx.save_for_backward(cosine_XD, sine_XD)
        first_sine, second_sine = sine_XD.chunk(2, -1)
        return _rotated(input_XD, cosine_XD, first_sine, second_sine, 1.0)

    @staticmethod
    def backward(ctx: _Saved, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine_XD, sine_XD = ctx.saved_tensors
        first_sine, second_sine = sine_XD.chunk(2, -1)
        return _rotated(gradients[0], cosine_XD, second_sine, first_sine, -1.0), None, None


def _rotated(x_XD: Tensor, cosine_XD: Tensor, first_sine: Tensor, second_sine: Tensor, sign: float) -> Tensor:
    """Return (x₁c₁ - sign·x₂s₁, x₂c₂ + sign·x₁s₂) of the halves x₁, x₂, with sines s₁, s₂ of half the channels."""
    result_XD = x_XD * cosine_XD
    first, second = x_XD.chunk(2, -1)
    result_first, result_second = result_XD.chunk(2, -1)
    result_first.addcmul_(second, first_sine, value=-sign)
    result_second.addcmul_(first, second_sine, value=sign)
    return result_XD


def _with_rope(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron-Core's function (which packed sequences use too) to call `rope` where both are equivalent."""

    @functools.wraps(original)
    def apply(t: Tensor, freqs: Tensor, *args: bool, mscale: float = 1.0, **options: bool | None) -> Tensor:
        special = args or any(options.values())  # interleaved, or multi-latent attention
        if special or freqs.shape[-1] != t.shape[-1] or freqs.shape[-1] % 2:
            return original(t, freqs, *args, mscale=mscale, **options)
        return rope(t, freqs, mscale)

    return apply
