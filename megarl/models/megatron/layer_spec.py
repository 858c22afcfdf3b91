"""Layer specs: Transformer Engine's on CUDA if it is installed, else Megatron's own modules.

Without Transformer Engine, Megatron-Core has no norm that accepts sequence parallelism and no attention that accepts
packed sequences; `RMSNorm` and `PackedAttention` fill these two gaps.

Shapes: T packed tokens of a micro-batch on a context-parallel rank, B sequences of equal length, S tokens of a sequence
(in `_in_order`: of a chunk), P context-parallel ranks, R query rows and K keys of a block, N query and G key/value
heads of this rank, D channels per head of queries and keys, C of values, E channels of a norm, X any leading axes.
"""

import importlib.util
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl import platforms
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.megatron.delta_net import GatedDeltaNet
from megarl.platforms import cpu_kernels

WINDOW_BLOCK = 256  # query rows per block of sliding-window attention


def use_transformer_engine() -> bool:
    """Return whether models are built from Transformer Engine modules: on CUDA, if it is installed."""
    return platforms.current().is_cuda and importlib.util.find_spec("transformer_engine") is not None


class RMSNorm(torch.nn.Module):
    """RMSNorm over the last axis, computed in fp32 and scaled in the input's dtype, as in `transformers` and vLLM.

    Its weight is tagged `sequence_parallel`, so Megatron sums its gradient over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        device = platforms.current().device
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_XE: torch.Tensor) -> torch.Tensor:
        """Return the input, normalized and scaled."""
        if cpu_kernels.enabled() and input_XE.dtype == self.weight.dtype == torch.float32:
            return cpu_kernels.rms_norm(input_XE, self.weight, self.eps)
        normed_XE = torch.nn.functional.rms_norm(input_XE.float(), (input_XE.shape[-1],), eps=self.eps)
        return normed_XE.to(input_XE.dtype) * self.weight


class ZeroCenteredRMSNorm(RMSNorm):
    """An RMSNorm that scales by 1 + weight, in fp32."""

    def forward(self, input_XE: torch.Tensor) -> torch.Tensor:
        """Return the input, normalized and scaled."""
        scale_E = 1 + self.weight.float()
        if cpu_kernels.enabled() and input_XE.dtype == torch.float32:
            return cpu_kernels.rms_norm(input_XE, scale_E, self.eps)
        normed_XE = torch.nn.functional.rms_norm(input_XE.float(), (input_XE.shape[-1],), eps=self.eps)
        return (normed_XE * scale_E).to(input_XE.dtype)


class _NormWithOwnEps(RMSNorm):
    """An RMSNorm that ignores the eps that Megatron-Core passes."""

    def __init__(self, config: TransformerConfig, hidden_size: int, own_eps: float, **_: object) -> None:
        super().__init__(config, hidden_size, own_eps)


class PackedAttention(torch.nn.Module):
    """Causal `scaled_dot_product_attention` within each sequence of a packed micro-batch.

    With context parallelism each rank holds two chunks of each sequence, and gathers the keys and values of all ranks.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        if config.window_attn_skip_freq is not None:
            raise ValueError("window_attn_skip_freq (a window in some layers only) needs Transformer Engine")
        self.softmax_scale, self.context = softmax_scale, config.context_parallel_size
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(  # the names are Megatron's, which passes some of them by keyword
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return attention's output, before the output projection, in the dtype of the inputs.

        Packed (THD): query [T, N, D], key [T, G, D], value [T, G, C] -> [T, N * C]. Tokens beyond the last sequence
        get zeros. Not packed: query [S, B, N, D], key [S, B, G, D], value [S, B, G, C] -> [S, B, N * C]. The mask is
        causal within each sequence and limited to the window of `config.window_size`; `attention_mask` is ignored.
        """
        if packed_seq_params is None:
            q_BNSD, k_BGSD, v_BGSC = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out_BNSC = self._attend(q_BNSD, k_BGSD, v_BGSC)
            return out_BNSC.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        runs = _runs(bounds.tolist())
        if self.context > 1:
            return self._across_ranks(query, key, value, runs)
        tokens = [count * length for count, length in runs]
        tail = query.shape[0] - sum(tokens)
        # Not slices: the backward pass of each slice would write and add a gradient as large as the whole tensor.
        pieces = (x.split([*tokens, tail] if tail else tokens) for x in (query, key, value))
        parts = []
        for (count, length), *run in zip(runs, *pieces, strict=not tail):
            q_BNSD, k_BGSD, v_BGSC = (x.unflatten(0, (count, length)).transpose(1, 2) for x in run)
            parts.append(self._attend(q_BNSD, k_BGSD, v_BGSC).transpose(1, 2).reshape(count * length, -1))
        if tail:
            parts.append(query.new_zeros(tail, query.shape[1] * value.shape[2]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _across_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Return the output [T, N * C] of this rank's tokens. `runs`: of the whole sequences."""
        size, group = self.context, parallel_state.get_context_parallel_group()
        rank, longest = group.rank(), max(length for _, length in runs)
        tokens = [count * length // size for count, length in runs]
        # The backward pass sums the gradients of all ranks' keys and values, and scatters them.
        gathered = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        keys, values = (x.unflatten(0, (size, -1)).split(tokens, 1) for x in gathered)
        window = longest if self.window is None else min(self.window, longest)
        band_RK = _band(min(WINDOW_BLOCK, longest // (2 * size)), window, query.dtype, query.device)
        parts = []
        for (count, length), q, k, v in zip(runs, query.split(tokens), keys, values, strict=True):
            chunk = length // (2 * size)
            q_B2NSD = q.unflatten(0, (count, 2, chunk)).transpose(2, 3)
            k_BGSD, v_BGSC = (_in_order(x.unflatten(1, (count, 2, chunk))) for x in (k, v))
            if missing := k.shape[-1] - v.shape[-1]:
                # Not in `_product`, which would pad and keep a copy for each block.
                v_BGSC = torch.nn.functional.pad(v_BGSC, (0, missing))
            outputs = []
            for index, start in enumerate((rank * chunk, (2 * size - 1 - rank) * chunk)):
                seen = slice(0, start + chunk)
                outputs.append(self._attend(q_B2NSD[:, index], k_BGSD[:, :, seen], v_BGSC[:, :, seen], start, band_RK))
            parts.append(torch.stack(outputs, 1)[..., : v.shape[-1]].transpose(2, 3).reshape(len(q), -1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend(
        self,
        q_BNSD: torch.Tensor,
        k_BGSD: torch.Tensor,
        v_BGSC: torch.Tensor,
        offset: int = 0,
        band_RK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output [B, N, S, C] of causal attention within the window.

        `offset`: position of the first query; the first key is at 0. `band_RK`: `_band` of the window.
        """
        length = q_BNSD.shape[2]
        if not offset and (self.window is None or length <= self.window):
            return self._product(q_BNSD, k_BGSD, v_BGSC, None)
        if band_RK is None:
            assert self.window is not None
            band_RK = _band(WINDOW_BLOCK, self.window, q_BNSD.dtype, q_BNSD.device)
        block = len(band_RK)
        window = band_RK.shape[1] - block + 1
        # Blocks of queries, each with only the keys that it sees: neither time nor memory is quadratic.
        parts = []
        for start in range(offset, offset + length, block):
            stop, first = min(start + block, offset + length), max(0, start - window + 1)
            mask_RK = band_RK[: stop - start, first - start + window - 1 :][:, : stop - first]
            q_BNRD = q_BNSD[:, :, start - offset : stop - offset]
            k_BGKD, v_BGKC = k_BGSD[:, :, first:stop], v_BGSC[:, :, first:stop]
            parts.append(self._product(q_BNRD, k_BGKD, v_BGKC, mask_RK))
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def _product(
        self, q_BNRD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKC: torch.Tensor, mask_RK: torch.Tensor | None
    ) -> torch.Tensor:
        """Return softmax(q k + mask) v, [B, N, R, C]; without a mask the product is causal and R = K."""
        # The fused kernels accept only one head size; the unfused one, which accepts two, stores all scores.
        value_size, key_size = v_BGKC.shape[-1], q_BNRD.shape[-1]
        if value_size < key_size:
            v_BGKC = torch.nn.functional.pad(v_BGKC, (0, key_size - value_size))
        if not _takes_groups(q_BNRD, masked=mask_RK is not None):
            heads = q_BNRD.shape[1] // k_BGKD.shape[1]
            k_BGKD, v_BGKC = k_BGKD.repeat_interleave(heads, 1), v_BGKC.repeat_interleave(heads, 1)
        out_BNRC = torch.nn.functional.scaled_dot_product_attention(
            q_BNRD,
            k_BGKD,
            v_BGKC,
            attn_mask=mask_RK,
            is_causal=mask_RK is None,
            scale=self.softmax_scale,
            enable_gqa=q_BNRD.shape[1] != k_BGKD.shape[1],
        )
        return out_BNRC[..., :value_size]


def _takes_groups(queries: torch.Tensor, *, masked: bool) -> bool:
    """Return whether a fused kernel takes fewer key heads than query heads.

    On CUDA only flash attention does (torch 2.13), without fp32 and masks. Unfused, all scores are kept for backward.
    """
    return not queries.is_cuda or (queries.dtype != torch.float32 and not masked)


@lru_cache(maxsize=2)
def _band(block: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the additive mask [R, K] of R = `block` queries, the first of which is at key `window - 1`.

    Cached so that all layers share the tensor that the backward pass keeps.
    """
    rows_R1 = torch.arange(block, device=device)[:, None]
    keys_1K = torch.arange(block + window - 1, device=device)[None]
    seen_RK = (keys_1K >= rows_R1) & (keys_1K <= rows_R1 + window - 1)
    return torch.zeros(seen_RK.shape, dtype=dtype, device=device).masked_fill(~seen_RK, -torch.inf)


def _in_order(x_PB2SGD: torch.Tensor) -> torch.Tensor:
    """Return the keys or values of P context-parallel ranks in token order, [B, G, 2 * P * S, D].

    Each rank holds two chunks of S tokens: one counted from the front, one from the back.
    """
    front, back = x_PB2SGD.unbind(2)
    return torch.cat([front, back.flip(0)]).permute(1, 3, 0, 2, 4).flatten(2, 3)


def _runs(bounds: list[int]) -> list[tuple[int, int]]:
    """Return runs of neighbouring sequences of equal length as (count, length): each is one batched attention."""
    lengths = (stop - start for start, stop in pairwise(bounds) if stop > start)
    return [(len(list(run)), length) for length, run in groupby(lengths)]


def block_spec(info: ModelInfo, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers (dense or mixture of experts) and final norm of this pipeline rank's chunk `vp_stage`."""
    if use_transformer_engine():
        return _engine_block(info, config, vp_stage)
    norm = _norm_of(info)
    moe = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [0] * config.num_layers
    layers = [
        _local_layer(info, config, config.num_moe_experts if flag else None, info.is_delta_layer(layer))
        for layer, flag in enumerate(moe)
    ]
    if config.pipeline_model_parallel_layout is not None:
        ids = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage)
        return TransformerBlockSubmodules([layers[i] for i in ids], layer_norm=norm)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layers[first : first + count], layer_norm=norm)


def _engine_block(info: ModelInfo, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    # With context parallelism Transformer Engine has no sliding windows for packed sequences (context_parallel.py).
    if not _has_packed_kernel(config) or (config.context_parallel_size > 1 and config.window_size is not None):
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
    if info.delta:
        # Transformer Engine's projections contain the norm before them; a DeltaNet layer's does not.
        parts = {"input_layernorm": _norm_of(info), "self_attention": _delta_net(info)}
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        block.layer_specs = [  # not changed in place: all layers share one spec
            replace(layer, submodules=replace(layer.submodules, **parts)) if info.is_delta_layer(number) else layer
            for number, layer in enumerate(block.layer_specs, start=first)
        ]
    if info.mla:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        if info.mla.norm_eps != info.norm_eps:
            raise ValueError(
                f"rms_norm_eps={info.norm_eps} is not supported by Transformer Engine, whose latent attention has one "
                f"eps for all norms; this family has {info.mla.norm_eps} inside attention; uninstall transformer_engine"
            )
        for layer in block.layer_specs:
            # Sharded as in the local spec; Transformer Engine's default is a copy on every rank.
            attention = layer.submodules.self_attention.submodules
            attention.linear_q_down_proj = attention.linear_kv_down_proj = TEColumnParallelLinear
    return block


def _has_packed_kernel(config: TransformerConfig) -> bool:
    """Return whether Transformer Engine has a kernel for packed sequences of this precision on this GPU.

    cuDNN's needs bf16 and Hopper or newer; flash-attn's needs bf16 (transformer-engine 2.20.2, `get_attention_backend`
    and nvte_get_fused_attn_backend_v2). Without a kernel it pads the sequences and keeps all scores for backward.
    """
    newer = torch.cuda.get_device_capability() >= (9, 0)
    return config.params_dtype == torch.bfloat16 and (newer or importlib.util.find_spec("flash_attn") is not None)


def _norm_of(info: ModelInfo) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if info.zero_centered_norms else RMSNorm


def _delta_net(info: ModelInfo) -> ModuleSpec:
    return ModuleSpec(module=GatedDeltaNet, params={"delta": info.delta})


def _local_layer(info: ModelInfo, config: TransformerConfig, num_experts: int | None, delta: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=info.mla is not None,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _norm_of(info)
    if delta:
        spec.submodules.self_attention = _delta_net(info)
        return spec
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if info.mla:
        norm = ModuleSpec(module=_NormWithOwnEps, params={"own_eps": info.mla.norm_eps})
        attention.kv_layernorm = norm
        attention.q_layernorm = norm if info.mla.query_rank else IdentityOp  # only compressed queries have one
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = _norm_of(info)
    return spec
