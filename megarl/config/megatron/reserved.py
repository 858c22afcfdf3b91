"""Fields of Megatron's configs that megarl sets, each with the reason or the key to use instead."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import typing
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from megarl.config.schema import MegatronConfig, Recompute, TrainerConfig

# Checks names and types of passed fields against Megatron-Core's dataclasses, which are imported only for that.
#
# `megatron.transformer`, `.optimizer` and `.ddp` pass fields by name. Unknown names, wrong types and fields that
# megarl sets are refused.


@functools.cache
def megatron_class(target: Target) -> type[Any]:
    """Return the dataclass of the target's fields. Raises ValueError if megatron-core is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing GPU packages
            from megatron.core.distributed import DistributedDataParallelConfig
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.transformer import TransformerConfig
    except ModuleNotFoundError:
        raise ValueError("megatron-core is not installed; run make setup") from None
    classes: dict[Target, type[Any]] = {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }
    return classes[target]


@functools.cache
def fields(target: Target) -> Mapping[str, Any]:
    """Return name -> type of every field that the constructor of the target's dataclass accepts."""
    made = megatron_class(target)
    hints = typing.get_type_hints(made)
    return {field.name: hints[field.name] for field in dataclasses.fields(made) if field.init}


def field_problem(target: Target, name: str, value: object) -> str | None:
    """Return the problem of `megatron.TARGET.NAME = value` with its fix, or None."""
    key = f"megatron.{target}.{name}"
    if name in RESERVED[target]:
        return f"{key}: reserved; {RESERVED[target][name]}"
    known = fields(target)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        class_name = megatron_class(target).__name__
        return f"{key}: {class_name} of the installed megatron-core has no such field{hint}"
    kind = inspect.formatannotation(known[name])
    try:
        TypeAdapter(known[name]).validate_json(json.dumps(value), strict=True)  # from JSON, a list is a tuple too
    except PydanticSchemaGenerationError:
        return f"{key}: cannot be given in YAML (its type is {kind}); remove it"
    except ValidationError:
        return f"{key}: must be {kind}, not {value!r}"
    return None


def ddp_fields(trainer: TrainerConfig, megatron: MegatronConfig) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig: megarl's defaults, overridden by `megatron.ddp`.

    Gradients are summed in fp32. Their reduction overlaps the backward pass; with the distributed optimizer, gathering
    the new weights overlaps the next forward pass. Megatron-Core allows the second overlap only with the first and the
    distributed optimizer (param_and_grad_buffer.py:272, 318).
    """
    passed, distributed = megatron.ddp, trainer.optimizer.distributed
    reduces = bool(passed.get("overlap_grad_reduce", True))
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": distributed and reduces,
        **passed,
    }


def transformer_fields(trainer: TrainerConfig, megatron: MegatronConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig: those of `trainer.recompute`, overridden by `megatron.transformer`."""
    return {**_recompute_fields(trainer.recompute), **megatron.transformer}


def passes_recompute(megatron: MegatronConfig) -> bool:
    """Return whether `megatron.transformer`, not `trainer.recompute`, decides about recomputation."""
    return any(name.startswith("recompute_") for name in megatron.transformer)


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    """Return Megatron's fields. An unresolved `auto` recomputes nothing (config/memory_plan/memory.py resolves it)."""
    if recompute in ("auto", "none"):
        return {}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": recompute}


Target = Literal["transformer", "optimizer", "ddp"]


def _each(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_TRANSFORMER = {
    **_each(
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size"
        " context_parallel_size"
        " sequence_parallel expert_model_parallel_size expert_tensor_parallel_size",
        "set it in trainer.parallel",
    ),
    **_each(
        "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels"
        " layernorm_epsilon layernorm_zero_centered_gamma normalization add_bias_linear add_qkv_bias"
        " gated_linear_unit qk_layernorm qk_l2_norm rotary_interleaved multi_latent_attention mtp_num_layers"
        " num_moe_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_router_pre_softmax"
        " moe_router_score_function moe_router_num_groups moe_router_group_topk moe_apply_probs_on_input"
        " moe_router_topk_scaling_factor moe_shared_expert_intermediate_size moe_shared_expert_gate"
        " moe_router_enable_expert_bias"
        " moe_latent_size window_size window_attn_skip_freq no_rope_freq softmax_scale softmax_type"
        " attention_output_gate is_hybrid_model apply_residual_connection_post_layernorm mrope_section"
        " heterogeneous_block_specs experimental_attention_variant glu_linear_offset"
        " activation_func_clamp_value",
        "it comes from model.path's config.json",
    ),
    **_each("fp16 bf16 enable_autocast", "set it in trainer.precision"),
    **_each(
        "hidden_dropout attention_dropout moe_input_jitter_eps",
        "noise is off, because the trainer's log-probs have to equal the engine's",
    ),
    **_each(
        "moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
        "dropped tokens make the trainer's log-probs differ from the engine's",
    ),
    **_each(
        "hybrid_context_parallel hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank",
        "all sequences are shared by the same ranks; set trainer.parallel.context",
    ),
    **_each(
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout"
        " account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        "set trainer.parallel.first_stage_layers, last_stage_layers or pipeline_layout",
    ),
    "moe_enable_routing_replay": "set trainer.router_replay",
    **_each("use_cpu_initialization transformer_impl", "it depends on the platform"),
    **_each("perform_initialization init_model_with_meta_device", "set model.load_weights"),
    "calculate_per_token_loss": "megarl needs it true: a mean of micro-batch means is wrong for sequences of "
    "different lengths (the loss is normalised by global token counts)",
    "variable_seq_lengths": "megarl needs it true: packed micro-batches differ in length",
    "moe_router_force_load_balancing": "it routes at random and ignores the router, for benchmarks",
    "gradient_accumulation_fusion": "Transformer Engine's modules fuse weight gradients without it; Megatron's field "
    "also concerns the output layer, where it needs Apex",
    "defer_embedding_wgrad_compute": "the output layer is projected in chunks, outside Megatron",
    "test_mode": "it is for Megatron's own tests",
}

_OPTIMIZER = {
    **_each(
        "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad use_distributed_optimizer",
        "set it in trainer.optimizer",
    ),
    **_each("fp16 bf16", "set it in trainer.precision"),
    **_each(
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "bf16 and fp32 need no loss scaling",
    ),
    "overlap_param_gather": "set it in megatron.ddp",
    **_each(
        "use_precision_aware_optimizer optimizer_cpu_offload optimizer_offload_fraction",
        "its state cannot be saved in a form that a resume can load",
    ),
}

_DDP = {
    **_each(
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy",
        "only Megatron's DDP and distributed optimizer are supported",
    ),
    "use_distributed_optimizer": "set it in trainer.optimizer.distributed",
    "average_in_collective": "gradients are summed and divided by global token counts; Megatron refuses the "
    "average together with calculate_per_token_loss",
    "num_distributed_optimizer_instances": "state sharded over a part of the data-parallel group cannot be "
    "saved in a form that another layout can load",
}

RESERVED: dict[Target, dict[str, str]] = {
    "transformer": _TRANSFORMER,
    "optimizer": _OPTIMIZER,
    "ddp": _DDP,
}

# Kernels and communication that exist only on GPUs: refused for runs without one.
GPU_ONLY: dict[Target, frozenset[str]] = {
    "transformer": frozenset(
        _each(
            "apply_rope_fusion bias_dropout_fusion masked_softmax_fusion"
            " cross_entropy_loss_fusion moe_permute_fusion moe_router_fusion"
            " moe_grouped_gemm fused_single_qkv_rope use_te_rng_tracker use_te_activation_func fp8 fp4"
            " tp_comm_overlap moe_enable_deepep persist_layer_norm memory_efficient_layer_norm cpu_offloading"
            " enable_cuda_graph external_cuda_graph batch_invariant_mode fine_grained_activation_offloading"
            " deallocate_pipeline_outputs",
            "",
        )
    ),
    "optimizer": frozenset(_each("reuse_grad_buf_for_mxfp8_param_ag", "")),
    "ddp": frozenset(_each("nccl_ub fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag", "")),
}
