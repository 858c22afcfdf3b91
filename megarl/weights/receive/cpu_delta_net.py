"""vLLM's Gated DeltaNet on a CPU in fp32. vLLM 0.32 has it in bf16 alone, and its engine dies at the first request.

Shapes: T tokens of a step, S requests, H value heads, K and V channels of a key and a value head, X channels of the
convolution, W tokens that it sees.
"""

import typing
from typing import Any

import torch
from torch.nn import functional

from megarl.models.megatron.delta_rule import causal_conv, gated_delta_rule


def install() -> None:
    """Let vLLM's operator compute tensors of fp32; those of bf16 stay its own. Before vLLM registers it. Idempotent."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    own: Any = gdn_attention.cpu_gdn_attention_core
    if own.__module__ == __name__:
        return

    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: Any,  # noqa: ANN401  # a type of vLLM's
    ) -> None:
        if mixed_qkv.dtype == torch.float32:
            _in_fp32(mixed_qkv, b, a, core_attn_out, layer_name)
        else:
            own(mixed_qkv, b, a, core_attn_out, layer_name)

    # torch makes the operator's schema of them, and does not find the names of types that are strings.
    cpu_gdn_attention_core.__annotations__ = {**typing.get_type_hints(own), "return": None}
    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core


def _in_fp32(
    mixed_TX: torch.Tensor, b_TH: torch.Tensor, a_TH: torch.Tensor, out_THV: torch.Tensor, layer_name: str
) -> None:
    """Fill `out` of a layer for the requests of a step, and bring their states up to date."""
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    layer = context.no_compile_layers[getattr(layer_name, "value", layer_name)]
    if context.attn_metadata is None:  # vLLM measures its memory
        return
    step: Any = context.attn_metadata[layer.prefix]
    if step.spec_sequence_masks is not None:
        raise ValueError("fp32 on a CPU has no speculative decoding: remove rollout.engine_kwargs.speculative_config")
    if step.num_actual_tokens:
        decay_TH = -layer.A_log.exp() * functional.softplus(a_TH + layer.dt_bias)
        _attend(layer, step, mixed_TX, decay_TH, b_TH.sigmoid(), out_THV)


def _attend(
    layer: Any,  # noqa: ANN401  # a layer of vLLM's
    step: Any,  # noqa: ANN401  # its metadata
    mixed_TX: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    held, states = layer.kv_cache[:2]
    held_SWX = held.transpose(1, 2) if is_conv_state_dim_first() else held  # the W - 1 tokens before, by slot
    _, heads, value, key = states.shape
    states_SHKV = states.view(-1, heads, key, value)  # the memory is [K, V], whatever the shape says
    bounds = step.non_spec_query_start_loc.tolist()
    slots = step.non_spec_state_indices_tensor[: len(bounds) - 1].long()
    known = torch.ones(len(slots), dtype=torch.bool)
    if step.num_prefills:
        known[step.num_decodes :] = step.has_initial_state[step.num_decodes :]
    before_SWX = held_SWX[slots] * known[:, None, None]
    state_SHKV = states_SHKV[slots] * known[:, None, None, None]

    tokens = bounds[-1]
    weight_XW = layer.conv1d.weight.flatten(1)
    convolved_TX = functional.silu(causal_conv(mixed_TX[:tokens], weight_XW, bounds, before_SWX))
    keys = heads * layer.num_k_heads // layer.num_v_heads * key
    q, k, v = convolved_TX.split([keys, keys, heads * value], -1)
    q_TGK, k_TGK, v_THV = (x.unflatten(-1, (-1, size)) for x, size in ((q, key), (k, key), (v, value)))
    out, last = gated_delta_rule(q_TGK, k_TGK, v_THV, g_TH[:tokens], beta_TH[:tokens], bounds, state_SHKV)
    out_THV[:tokens] = out
    states_SHKV[slots] = last.to(states.dtype)
    for slot, past_WX, start, stop in zip(slots, before_SWX, bounds, bounds[1:], strict=False):
        held_SWX[slot] = torch.cat([past_WX, mixed_TX[start:stop]])[1 - weight_XW.shape[1] :]
