"""Megatron's config from a model and a layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.models.hf.read_config import load_info
from megarl.models.megatron.build_model import transformer_config
from megarl.models.megatron.layout import Layout
from tests.support.worlds.world import World


def test_traps_are_set_whatever_the_layout(model_dir: Callable[[str], Path]) -> None:
    info = load_info(model_dir("llama"))
    for layout in (Layout(), Layout(pipeline=2, virtual_pipeline=2, world_size=2)):
        config = transformer_config(info, layout, "bf16")
        assert config.calculate_per_token_loss and config.variable_seq_lengths
        assert config.moe_token_dispatcher_type == "alltoall"
        assert config.params_dtype == config.pipeline_dtype == torch.bfloat16
        interleaved = layout.virtual_pipeline is not None
        assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (interleaved, not interleaved)


def test_overrides_win_and_refusals_are_user_errors(model_dir: Callable[[str], Path]) -> None:
    info = load_info(model_dir("qwen3_moe"))
    config = transformer_config(
        info,
        Layout(),
        "fp32",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "recompute_granularity": "full",
         "recompute_method": "uniform", "recompute_num_layers": 1},
    )  # fmt: skip
    assert config.moe_aux_loss_coeff == 0.01 and config.recompute_granularity == "full"
    assert config.moe_router_dtype == "fp32" and config.moe_layer_freq == [1, 0, 1, 1]
    with pytest.raises(ValueError, match="Megatron-Core refuses"):
        transformer_config(info, Layout(), "fp32", {"no_such_field": 1})


@pytest.mark.world
def test_skipping_initialisation_keeps_what_the_gradient_norm_reads(
    world: Callable[[int], World], model_dir: Callable[[str], Path]
) -> None:
    """Megatron's own perform_initialization=False would lose tensor_model_parallel, and with it the true norm."""
    case = "tests.support.ranks.models.models:shard_attributes"
    initialised, skipped = (
        world(2).run(case, model_dir=str(model_dir("qwen3_moe")), initialize=flag)[0] for flag in (True, False)
    )
    assert initialised == skipped
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert skipped[qkv][:2] == (True, 0)
    assert skipped["decoder.layers.0.input_layernorm.weight"][-1] is True
