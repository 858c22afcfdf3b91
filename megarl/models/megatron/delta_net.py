"""The Gated DeltaNet layer, which replaces attention in Megatron-Core's GPTModel. Packed sequences, any device.

Megatron-Core's own layer needs the kernels of flash-linear-attention (fla) even on a CPU, and its `out_norm` diverges
between tensor ranks without sequence parallelism. Parameter names and checkpoint keys are the same. A tensor rank holds
whole key heads and their value heads.

Shapes: T packed tokens, H value heads of this rank, K and V channels of a key and of a value head, X channels.
"""

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
        # fla's kernels are for 16 bits on CUDA. A start warns where it is not installed (megarl/run/start/checks.py).
        half = platforms.current().is_cuda and dtype != torch.float32
        self.kernels = half and importlib.util.find_spec("fla") is not None
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
        rule = self._by_kernels if self.kernels else self._by_torch
        out_THV = rule(qkv_TX, g_TH, beta_TH, bounds)
        normed_THV = functional.rms_norm(out_THV.float(), out_THV.shape[-1:], eps=self.config.layernorm_epsilon)
        # Each rank scales other heads. This operator sums the scale's gradient over the ranks; tagging the weight
        # `sequence_parallel` would sum it again.
        scale_V = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        scaled_THV = normed_THV.to(out_THV.dtype) * scale_V
        gated_THV = scaled_THV * functional.silu(z_TX.float()).unflatten(-1, scaled_THV.shape[1:])
        return gated_THV.to(projected_TX.dtype).flatten(1)

    def _by_torch(
        self, qkv_TX: torch.Tensor, g_TH: torch.Tensor, beta_TH: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, H, V]: convolution and delta rule of packed queries, keys and values."""
        limits = bounds.tolist()
        q_TGK, k_TGK, v_THV = self._heads(functional.silu(causal_conv(qkv_TX, self.conv1d.weight[:, 0], limits)))
        return gated_delta_rule(q_TGK, k_TGK, v_THV, g_TH, beta_TH, limits)[0]

    def _by_kernels(
        self, qkv_TX: torch.Tensor, g_TH: torch.Tensor, beta_TH: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Return the same with fla's kernels. Tokens beyond the last sequence become one more sequence."""
        from fla.modules.convolution import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        ends = torch.cat([bounds.long(), bounds.new_tensor([len(qkv_TX)]).long()]).unique_consecutive()
        mixed, _ = causal_conv1d(
            x=qkv_TX[None].contiguous(), weight=self.conv1d.weight[:, 0], activation="silu", cu_seqlens=ends
        )
        q_TGK, k_TGK, v_THV = self._heads(mixed[0])
        # fla 0.4 needs a key head for each value head. It does not check that.
        repeats = self.delta.value_heads // self.delta.key_heads
        q_THK, k_THK = (x.repeat_interleave(repeats, 1) for x in (q_TGK, k_TGK))
        out, _ = chunk_gated_delta_rule(
            q_THK[None], k_THK[None], v_THV[None].contiguous(), g=g_TH[None], beta=beta_TH[None].to(v_THV.dtype),
            use_qk_l2norm_in_kernel=True, cu_seqlens=ends,
        )  # fmt: skip
        kept: torch.Tensor = out[0]
        return kept

    def _heads(self, mixed_TX: torch.Tensor) -> list[torch.Tensor]:
        """Return queries and keys [T, G, K] and values [T, H, V] of this rank."""
        sizes = (self.delta.key_dim, self.delta.key_dim, self.delta.value_dim)
        return [x.unflatten(-1, (-1, size)) for x, size in zip(mixed_TX.split(self.sizes, -1), sizes, strict=True)]


class _Weight(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
