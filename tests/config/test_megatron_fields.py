"""Field names and types are read from Megatron's source text: they must be those of the real dataclasses."""

from __future__ import annotations

import dataclasses

import pytest

from megarl.config.megatron_fields import fields, problem
from megarl.config.megatron_reserved import GPU_ONLY, RESERVED, Target


def real(target: Target) -> set[str]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    classes = {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    return {field.name for field in dataclasses.fields(classes[target])}


@pytest.mark.parametrize("target", ["transformer", "optimizer", "ddp"])
def test_same_fields_as_the_real_dataclass(target: Target) -> None:
    assert set(fields(target)) == real(target)
    assert set(RESERVED[target]) <= real(target)
    assert GPU_ONLY[target] <= real(target)


def test_types() -> None:
    assert problem("transformer", "window_attn_skip_freq", 1) is not None  # reserved
    assert problem("transformer", "recompute_modules", ["mlp"]) is None
    assert problem("transformer", "recompute_modules", [1]) is not None
    assert problem("transformer", "recompute_num_layers", None) is None
    assert problem("transformer", "moe_aux_loss_coeff", 1) is None  # an integer is a float
    assert problem("transformer", "moe_aux_loss_coeff", [0.1, 0.2]) is None
    assert problem("ddp", "overlap_grad_reduce", 1) is not None  # but 1 is not a boolean
