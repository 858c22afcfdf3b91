"""Builds Megatron's TransformerConfig and this rank's GPTModel chunks from an architecture and a layout.

Shapes: F frequencies, one for each pair of rotated channels of a head.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl import platforms
from megarl.models.architecture.architecture import LatentAttention, ModelInfo
from megarl.models.architecture.rope import attention_factor, inverse_frequencies, yarn_betas
from megarl.models.megatron.layer_spec import block_spec, use_transformer_engine
from megarl.models.megatron.layout import Layout
from megarl.platforms import cpu_kernels

Precision = Literal["bf16", "fp32"]


def padded_vocab(info: ModelInfo, tp: int) -> int:
    """Return the vocabulary size rounded up to a multiple of `tp`. Log-probs must mask the padded columns."""
    return -(-info.vocab_size // tp) * tp


def transformer_config(
    info: ModelInfo,
    layout: Layout,
    precision: Precision,
    overrides: Mapping[str, Any] | None = None,
    *,
    initialize: bool = True,
) -> TransformerConfig:
    """Return Megatron's config of this model under this layout.

    `overrides`: TransformerConfig fields by name (`megatron.transformer` in the config); they override everything else.
    `initialize=False` leaves the weights uninitialised, for a load that writes all of them. Raises ValueError if
    Megatron-Core refuses the combination.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    fields: dict[str, Any] = {
        **_architecture(info),
        **_parallelism(layout, dtype),
        **_platform_fields(initialize),
        "params_dtype": dtype,
        "bf16": precision == "bf16",
    }
    if info.num_experts:
        fields.update(_mixture(info))
    if info.mla:
        fields.update(_latent_attention(info, info.mla))
    if info.vision:
        # Transformer Engine's kernel uses the angles of the first tokens for every packed sequence.
        fields["apply_rope_fusion"] = False
    fields.update(overrides or {})
    try:
        return (MLATransformerConfig if info.mla else TransformerConfig)(**fields)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"Megatron-Core refuses this model and layout: {error}") from error


def build_model(info: ModelInfo, tf_config: TransformerConfig, layout: Layout) -> list[GPTModel]:
    """Build this rank's model chunks (one, or one per virtual pipeline stage) on the platform's device.

    Requires Megatron's parallel_state initialised with `layout`, and a call of `model_parallel_cuda_manual_seed`. The
    chunks are bare (no DDP or Float16Module); their parameters have dtype `tf_config.params_dtype`.
    """
    stages: list[int | None] = list(range(layout.virtual_pipeline)) if layout.virtual_pipeline else [None]
    return [_build_chunk(info, tf_config, layout, stage) for stage in stages]


def _build_chunk(info: ModelInfo, config: TransformerConfig, layout: Layout, stage: int | None) -> GPTModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
    arguments: dict[str, Any] = {
        "config": config,
        "transformer_layer_spec": block_spec(info, config, stage),
        "vocab_size": padded_vocab(info, layout.tensor),
        "max_sequence_length": info.max_positions,
        "pre_process": first,
        "post_process": last,
        "parallel_output": True,
        "share_embeddings_and_output_weights": info.tied,
        "rotary_base": int(info.rope_theta),
        "vp_stage": stage,
    }
    device = platforms.current().device
    if info.vision is not None:
        from megarl.models.megatron.vision_model import VisionGPTModel

        model: GPTModel = VisionGPTModel(info, info.vision, device, **arguments)
    else:
        model = GPTModel(**arguments, position_embedding_type="rope")
        if info.mla is None:
            dim = info.rotary_dim or info.head_dim
            frequencies_F = inverse_frequencies(dim, info.rope_theta, info.rope_scaling)
            model.rotary_pos_emb.inv_freq = frequencies_F.to(device)
    if platforms.current().is_cuda:
        model = model.to(device)
    return model


def _architecture(info: ModelInfo) -> dict[str, Any]:
    factor = attention_factor(info.rope_scaling)
    return {
        "num_layers": info.num_layers,
        "hidden_size": info.hidden,
        "ffn_hidden_size": info.ffn,
        "num_attention_heads": info.heads,
        "num_query_groups": info.kv_heads,
        "kv_channels": info.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": info.norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": info.qkv_bias,
        "qk_layernorm": info.qk_norm,
        "attention_output_gate": info.attention_gate,
        "layernorm_zero_centered_gamma": info.zero_centered_norms,
        "mrope_section": None if info.vision is None else list(info.vision.rope_sections),
        # A query sees itself and the window - 1 tokens before it.
        "window_size": None if info.window is None else (info.window - 1, 0),
        # YaRN scales rotated queries and keys; scaling their products by the square is equivalent.
        "softmax_scale": None if factor == 1.0 else factor**2 / info.head_dim**0.5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _parallelism(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline is not None
    return {
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence,
        "pipeline_dtype": dtype,
        # Packed micro-batches differ in length. With this setting Megatron-Core refuses its default dispatcher, even
        # for dense models.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Without overlap, the interleaved schedule with PP = 2 posts two sends to the same peer: the gradients are
        # silently wrong, or the run fails.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # The interleaved schedule frees an output before its send is complete (schedules.py:1600). CUDA streams keep
        # the order; gloo still reads the memory, so activations would occasionally be wrong.
        "deallocate_pipeline_outputs": platforms.current().is_cuda or not interleaved,
        # The trainer divides summed losses by global counts; the default is a mean of micro-batch means.
        "calculate_per_token_loss": True,
    }


def _platform_fields(initialize: bool) -> dict[str, Any]:
    cuda, engine = platforms.current().is_cuda, use_transformer_engine()
    fields: dict[str, Any] = {
        # The same initial weights under every layout on the CPU. Loaded weights do not need it.
        "use_cpu_initialization": not cuda and initialize,
        "bias_activation_fusion": cuda or cpu_kernels.enabled(),
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": engine,
        "persist_layer_norm": engine,
        "gradient_accumulation_fusion": False,
        "moe_grouped_gemm": engine,
        "moe_permute_fusion": engine,
    }
    if not initialize:
        # perform_initialization=False would also skip the weights' tensor_model_parallel attributes, and the gradient
        # norm would then count only rank 0's shards.
        fields.update(init_method=_leave, output_layer_init_method=_leave, embedding_init_method=_leave)
    return fields


def _latent_attention(info: ModelInfo, mla: LatentAttention) -> dict[str, Any]:
    """Return the fields of multi-head latent attention, which computes RoPE itself: only plain or YaRN."""
    yarn = info.rope_scaling or {"factor": 1.0}
    beta_fast, beta_slow = yarn_betas(yarn)
    paired = yarn.get("mscale") and yarn.get("mscale_all_dim")
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.query_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.plain,
        "qk_pos_emb_head_dim": mla.rotated,
        "v_head_dim": mla.value,
        "kv_channels": mla.value,
        "qk_layernorm": True,
        "softmax_scale": None,
        "rope_type": "yarn" if info.rope_scaling else "rope",
        "rotary_base": info.rope_theta,
        "rotary_scaling_factor": float(yarn["factor"]),
        "original_max_position_embeddings": yarn.get("original_max_position_embeddings", info.max_positions),
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        # 1 and 0: YaRN's default factor on the rotated channels, and none on the products of queries and keys.
        "mscale": float(yarn["mscale"]) if paired else 1.0,
        "mscale_all_dim": float(yarn["mscale_all_dim"]) if paired else 0.0,
        "apply_rope_fusion": False,
    }


def _mixture(info: ModelInfo) -> dict[str, Any]:
    groups, kept = info.router_groups or (None, None)
    return {
        "num_moe_experts": info.num_experts,
        "moe_ffn_hidden_size": info.moe_ffn,
        "moe_router_topk": info.topk,
        "moe_layer_freq": [int(flag) for flag in info.moe_layers],
        # In transformers, norm_topk_prob=True is a softmax over the chosen experts, False one over all experts.
        "moe_router_pre_softmax": not info.norm_topk_prob,
        "moe_router_score_function": info.router_score,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": kept,
        "moe_router_topk_scaling_factor": None if info.router_scale == 1.0 else info.router_scale,
        "moe_router_enable_expert_bias": info.expert_bias,
        # Load balancing belongs to pre-training: the bias stays as loaded unless megatron.transformer sets a rate.
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": info.shared_ffn or None,
        "moe_shared_expert_gate": info.shared_expert_gate,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    """Initialise nothing: return `tensor` as it is."""
    return tensor
