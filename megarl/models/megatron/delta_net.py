"""The Gated DeltaNet layer, which replaces attention in Megatron-Core's GPTModel. Packed sequences, any device.

Megatron-Core's own layer needs the kernels of flash-linear-attention (fla) even on a CPU, and its `out_norm` diverges
between tensor ranks without sequence parallelism. Parameter names and checkpoint keys are the same. A tensor rank holds
whole key heads and their value heads.

Shapes: T packed tokens, H value heads of this rank, K and V channels of a key and of a value head, X channels.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from megarl import platforms
from megarl.models.architecture.architecture import DeltaNet
from megarl.models.megatron.delta_rule import causal_conv, gated_delta_rule


class GatedDeltaNet(MegatronModule):
    """Projection, convolution, gated delta rule, gated norm per head, projection.

    `delta`: the sizes of the whole model. Raises ValueError for context parallelism.
    """

    def __init__(
        self, config: TransformerConfig, delta: DeltaNet, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config)
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism is not supported with Gated DeltaNet layers")
        self.delta, self.tp_group = delta, pg_collection.tp
        size, device, dtype = self.tp_group.size(), platforms.current().device, config.params_dtype
        keys, values, self.heads = delta.keys // size, delta.values // size, delta.value_heads // size
        self.sizes = [keys, keys, values]
        linear: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            2 * (delta.keys + delta.values + delta.value_heads),
            init_method=config.init_method,
            gather_output=False,
            **linear,
        )
        self.conv1d = _Weight(torch.ones(sum(self.sizes), 1, delta.conv, dtype=dtype, device=device))
        # fp32 in every precision, because they are used in exponents.
        self.dt_bias = torch.nn.Parameter(torch.ones(self.heads, device=device))
        self.A_log = torch.nn.Parameter(torch.zeros(self.heads, device=device))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            shard: Any = parameter
            shard.tensor_model_parallel, shard.partition_dim, shard.partition_stride = True, 0, 1
        self.out_norm = _Weight(torch.ones(delta.value_dim, dtype=dtype, device=device))
        self.out_proj = RowParallelLinear(
            delta.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output in the shape of the input, and no bias. The other arguments are attention's.

        Packed (THD): [tokens, 1, hidden]; with sequence parallelism this rank's tokens. Not packed: [tokens, sequences,
        hidden].
        """
        projected, _ = self.in_proj(hidden_states)
        length, sequences, _ = projected.shape
        if packed_seq_params is None:
            bounds = torch.arange(0, length * sequences + 1, length, device=projected.device)
        elif (padded := packed_seq_params.cu_seqlens_q_padded) is not None:
            bounds = padded
        else:
            bounds = packed_seq_params.cu_seqlens_q
        mixed_TX = self._mix(projected.transpose(0, 1).flatten(0, 1), bounds)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.out_proj(
            mixed_TX.unflatten(0, (sequences, length)).transpose(0, 1).contiguous()
        )
        return output

    def _mix(self, projected_TX: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Return the heads' gated outputs [T, X]. `bounds`: where sequences begin, and the end of the last."""
        keys, _, values = self.sizes
        qkv_TX, z_TX, b_TH, a_TH = projected_TX.split([2 * keys + values, values, self.heads, self.heads], -1)
        beta_TH = b_TH.float().sigmoid()
        g_TH = -self.A_log.exp() * functional.softplus(a_TH.float() + self.dt_bias)
        rule = _by_kernels if _has_kernels(projected_TX) else _by_torch
        out_THV = rule(qkv_TX, self.conv1d.weight[:, 0], self.sizes, self.delta, g_TH, beta_TH, bounds)
        normed_THV = functional.rms_norm(out_THV.float(), out_THV.shape[-1:], eps=self.config.layernorm_epsilon)
        # Each rank scales other heads. This operator sums the scale's gradient over the ranks; tagging the weight
        # `sequence_parallel` would sum it again.
        scale_V = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        scaled_THV = normed_THV.to(out_THV.dtype) * scale_V
        gated_THV = scaled_THV * functional.silu(z_TX.float()).unflatten(-1, scaled_THV.shape[1:])
        return gated_THV.to(projected_TX.dtype).flatten(1)


class _Weight(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


def _has_kernels(tensor: torch.Tensor) -> bool:
    """Return whether fla's kernels can be used: fla is installed, the tensor has 16 bits and is on CUDA."""
    half = tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)
    return half and importlib.util.find_spec("fla") is not None


def _by_torch(
    qkv_TX: torch.Tensor,
    weight_XW: torch.Tensor,
    sizes: list[int],
    delta: DeltaNet,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds: torch.Tensor,
) -> torch.Tensor:
    """Return [T, H, V]: convolution and delta rule of packed queries, keys and values."""
    limits = bounds.tolist()
    q, k, v = functional.silu(causal_conv(qkv_TX, weight_XW, limits)).split(sizes, -1)
    q_TGK, k_TGK = (x.unflatten(-1, (-1, delta.key_dim)) for x in (q, k))
    out_THV, _ = gated_delta_rule(q_TGK, k_TGK, v.unflatten(-1, (-1, delta.value_dim)), g_TH, beta_TH, limits)
    return out_THV


def _by_kernels(
    qkv_TX: torch.Tensor,
    weight_XW: torch.Tensor,
    sizes: list[int],
    delta: DeltaNet,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    bounds: torch.Tensor,
) -> torch.Tensor:
    """Return the same with fla's kernels. Tokens beyond the last sequence become one more sequence."""
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    ends = torch.cat([bounds.long(), bounds.new_tensor([len(qkv_TX)]).long()]).unique_consecutive()
    mixed, _ = causal_conv1d(x=qkv_TX[None].contiguous(), weight=weight_XW, activation="silu", cu_seqlens=ends)
    q, k, v = mixed.split(sizes, -1)
    q, k = (x.unflatten(-1, (-1, delta.key_dim)).contiguous() for x in (q, k))
    v = v.unflatten(-1, (-1, delta.value_dim)).contiguous()
    out, _ = chunk_gated_delta_rule(
        q, k, v, g=g_TH[None], beta=beta_TH[None].to(v.dtype), use_qk_l2norm_in_kernel=True, cu_seqlens=ends
    )
    kept: torch.Tensor = out[0]
    return kept
