"""Layer specs: Transformer Engine's on CUDA when it is installed, and Megatron's own modules otherwise.

Without Transformer Engine, Megatron-Core 0.16.1 has no norm that accepts sequence parallelism and no
attention that accepts packed sequences; `RMSNorm` and `PackedAttention` are those two. Shapes: T packed
tokens of a micro-batch, S sequence, B batch (1 when packed), N query heads, G key/value heads, D head size of
queries and keys, V of values, all of this rank.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl import platforms
from megarl.models.info import ModelInfo

WINDOW_BLOCK = 256  # rows per product of a sliding window


def use_transformer_engine() -> bool:
    """Whether models are built from Transformer Engine modules: on CUDA, when it is installed."""
    return platforms.current().is_cuda and importlib.util.find_spec("transformer_engine") is not None


class RMSNorm(torch.nn.Module):
    """RMSNorm computed in fp32, scaled in the input's dtype (as `transformers` and vLLM do).

    Its weight is tagged `sequence_parallel`, so Megatron sums its gradient over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = platforms.current().device
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return normed.to(x.dtype) * self.weight


class _NormWithOwnEps(RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, own_eps: float, **_: Any) -> None:
        super().__init__(config, hidden_size, own_eps)


class PackedAttention(torch.nn.Module):
    """Causal attention by `scaled_dot_product_attention`, sequence by sequence of a packed micro-batch."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError("context parallelism needs Transformer Engine")
        if config.window_attn_skip_freq is not None:
            raise ValueError("window_attn_skip_freq (a window in some layers only) needs Transformer Engine")
        self.softmax_scale = softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(  # Megatron's signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Packed (THD): query [T, N, D], key [T, G, D], value [T, G, V] -> [T, N * V]; the mask is causal per
        sequence, and as wide as `config.window_size` says.

        Not packed: [S, B, N, D] -> [S, B, N * V]. Tokens beyond the last sequence get zeros.
        """
        if packed_seq_params is None:
            out = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        parts = []
        for start, count, length in _runs(bounds.tolist()):
            stop = start + count * length
            q, k, v = (x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value))
            parts.append(self._attend(q, k, v).transpose(1, 2).reshape(stop - start, -1))
        tail = query.shape[0] - sum(part.shape[0] for part in parts)
        if tail:
            parts.append(query.new_zeros(tail, query.shape[1] * value.shape[2]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length, window = q.shape[2], self.window
        if window is None or length <= window:
            return self._product(q, k, v, is_causal=True)
        # Rows in blocks, each with the keys that any of them sees: neither time nor memory is quadratic.
        parts = []
        for start in range(0, length, WINDOW_BLOCK):
            stop, first = min(start + WINDOW_BLOCK, length), max(0, start - window + 1)
            mask = _band(window, q.dtype, q.device)[: stop - start, first - start + window - 1 :][:, : stop - first]
            parts.append(self._product(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], attn_mask=mask))
        return torch.cat(parts, 2)

    def _product(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> torch.Tensor:
        # The fused kernels want one head size; the plain one that takes two keeps a matrix of all scores.
        columns, width = v.shape[-1], q.shape[-1]
        if columns < width:
            v = torch.nn.functional.pad(v, (0, width - columns))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1], **mask
        )
        return out[..., :columns]


@lru_cache(maxsize=2)
def _band(window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask [rows, keys] of a block whose first row is key `window - 1`; made once, as backward keeps it."""
    rows = torch.arange(WINDOW_BLOCK, device=device)[:, None]
    keys = torch.arange(WINDOW_BLOCK + window - 1, device=device)[None]
    seen = (keys >= rows) & (keys <= rows + window - 1)
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)


def _runs(bounds: list[int]) -> list[tuple[int, int, int]]:
    """Neighbouring sequences of equal length as (start, count, length): each run is one batched attention."""
    runs: list[tuple[int, int, int]] = []
    for start, stop in pairwise(bounds):
        length = stop - start
        if length == 0:
            continue
        if runs and runs[-1][2] == length:
            first, count, _ = runs[-1]
            runs[-1] = (first, count + 1, length)
        else:
            runs.append((start, 1, length))
    return runs


def block_spec(info: ModelInfo, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline rank's chunk `vp_stage`, dense or mixture of experts, and final norm."""
    if use_transformer_engine():
        return _engine_block(info, config, vp_stage)
    dense = _local_layer(info, config, None)
    sparse = _local_layer(info, config, config.num_moe_experts) if config.num_moe_experts else dense
    moe = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [0] * config.num_layers
    layers = [sparse if flag else dense for flag in moe]
    if config.pipeline_model_parallel_layout is not None:
        from megatron.core.transformer.enums import LayerType

        ids = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage)
        return TransformerBlockSubmodules([layers[i] for i in ids], layer_norm=RMSNorm)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layers[first : first + count], layer_norm=RMSNorm)


def _engine_block(info: ModelInfo, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if info.mla:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        if info.mla.norm_eps != info.norm_eps:
            raise ValueError(
                f"rms_norm_eps={info.norm_eps}: Transformer Engine's latent attention has one eps for all norms, this "
                f"family {info.mla.norm_eps} for those inside attention; uninstall transformer_engine"
            )
        for layer in block.layer_specs:
            # Sharded as in the local spec; Transformer Engine's own choice is a copy on every rank.
            attention = layer.submodules.self_attention.submodules
            attention.linear_q_down_proj = attention.linear_kv_down_proj = TEColumnParallelLinear
    return block


def _local_layer(info: ModelInfo, config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=info.mla is not None,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if info.mla:
        norm = ModuleSpec(module=_NormWithOwnEps, params={"own_eps": info.mla.norm_eps})
        attention.q_layernorm = attention.kv_layernorm = norm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
