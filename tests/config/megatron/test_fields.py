"""Passed fields of Megatron's dataclasses: names and types."""

import pytest

from megarl.config.megatron.reserved import GPU_ONLY, RESERVED, Target, field_problem, fields


@pytest.mark.parametrize("target", ["transformer", "optimizer", "ddp"])
def test_the_tables_name_fields_that_exist(target: Target) -> None:
    assert set(RESERVED[target]) <= set(fields(target))
    assert GPU_ONLY[target] <= set(fields(target))


def test_types() -> None:
    assert field_problem("transformer", "window_attn_skip_freq", 1) is not None  # reserved
    assert field_problem("transformer", "recompute_modules", ["mlp"]) is None
    assert field_problem("transformer", "recompute_modules", [1]) is not None
    assert field_problem("transformer", "recompute_num_layers", None) is None
    assert field_problem("transformer", "moe_aux_loss_coeff", 1) is None  # an integer is a float
    assert field_problem("transformer", "moe_aux_loss_coeff", [0.1, 0.2]) is None
    assert field_problem("ddp", "overlap_grad_reduce", 1) is not None  # but 1 is not a boolean
    unknown = field_problem("transformer", "moe_aux_loss_coef", 1)
    assert unknown is not None and "has no such field; did you mean moe_aux_loss_coeff or " in unknown
