"""Gradients of a model on a CPU, and how often each function of `cpu_kernels.py` was called for them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.mlp import MLP

from megarl.models.megatron.layer_spec import RMSNorm
from megarl.platforms import cpu_kernels
from tests.support.ranks.models.layouts import make_layout, use_layout
from tests.support.ranks.models.models import load, packed

Calls = dict[str, int]


def gradients(
    model_dir: str, micro_batch: list[list[int]], precision: str = "fp32", plain: bool = False
) -> tuple[Calls, Calls, dict[str, torch.Tensor]]:
    """Return the calls, the modules that make such calls, and the gradient of each parameter.

    `plain` computes with the functions of torch and Megatron-Core.
    """
    with use_layout(make_layout()) as layout, ExitStack() as stack:
        calls = stack.enter_context(_plain() if plain else _counted())
        _, _, [chunk] = load(model_dir, layout, precision)
        logits = chunk(**packed(micro_batch, 1))
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        (logits.float().log_softmax(-1) * weights).sum().backward()
        modules = {
            "norm": sum(isinstance(each, RMSNorm) for each in chunk.modules()),
            "mlp": sum(isinstance(each, MLP) for each in chunk.modules()),
            "layers": len(chunk.decoder.layers),
        }
        found = {name: parameter.grad for name, parameter in chunk.named_parameters() if parameter.grad is not None}
    return dict(calls), modules, found


@contextmanager
def _plain() -> Iterator[Counter[str]]:
    rope = rope_utils._apply_rotary_pos_emb_bshd.__wrapped__
    with (
        patch.object(cpu_kernels, "enabled", lambda: False),
        patch.object(rope_utils, "_apply_rotary_pos_emb_bshd", rope),
    ):
        yield Counter()


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    assert fused_bias_swiglu.swiglu_back is cpu_kernels.swiglu_back
    with ExitStack() as stack:
        for owner, name, key in (
            (cpu_kernels._RMSNorm, "forward", "norm forward"),
            (cpu_kernels._RMSNorm, "backward", "norm backward"),
            (cpu_kernels._RoPE, "forward", "rope forward"),
            (cpu_kernels._RoPE, "backward", "rope backward"),
        ):
            stack.enter_context(patch.object(owner, name, staticmethod(counted(key, getattr(owner, name)))))
        for name, key in (("swiglu", "swiglu forward"), ("swiglu_back", "swiglu backward")):
            function = counted(key, getattr(fused_bias_swiglu, name))
            stack.enter_context(patch.object(fused_bias_swiglu, name, function))
        yield calls
