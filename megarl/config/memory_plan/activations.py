"""What one layer keeps for its backward pass, in bytes per packed token.

Activations are the tensors that Megatron-Core's modules save, per packed token, with evenly loaded experts. `fused`
models use Transformer Engine's layer spec (GPUs); others use Megatron's modules with megarl's RMSNorm and packed
attention on a CPU (in fp32 on a GPU their norms keep one more tensor). Tests compare the unfused kind with the tensors
that autograd saves; the fused kind is derived from source code only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.common.values import FP32
from megarl.models.architecture.architecture import DELTA_CHUNK, DeltaNet, LatentAttention, ModelInfo
from megarl.models.megatron.layout import Layout

CHUNK_ROWS = 1.25  # rows of the rule's chunks per token, because sequences end inside chunks. An estimate


@dataclass(frozen=True)
class Sizes:
    """Elements per packed token on one rank; `shard` is the hidden size, divided by TP under sequence parallelism."""

    hidden: int
    shard: int
    q: int
    kv: int
    head: int
    ffn: int
    moe_ffn: int
    shared_ffn: int
    context: int
    routed: float  # expert rows per packed token
    router: int
    element: int
    fused: bool

    @property
    def norm_is_one_function(self) -> bool:
        """True for a norm that keeps only its input: Transformer Engine's, and the CPU's in fp32."""
        return self.fused or self.element == FP32

    @classmethod
    def of(cls, info: ModelInfo, layout: Layout, element: int, *, fused: bool, load: float = 1.0) -> Sizes:
        """Return the sizes of one rank. `load`: rows of its experts, relative to an even distribution."""
        tensor = layout.tensor
        split = tensor if layout.sequence else 1
        return cls(
            hidden=info.hidden,
            shard=info.hidden // split,
            q=info.heads * info.head_dim // tensor,
            kv=max(1, info.kv_heads // tensor) * info.head_dim,
            head=info.head_dim,
            ffn=info.ffn // tensor,
            moe_ffn=info.moe_ffn // layout.etp,
            shared_ffn=info.shared_ffn // tensor,
            context=layout.context,
            routed=load * info.topk * layout.etp / split,
            router=(info.num_experts or 0) // split,
            element=element,
            fused=fused,
        )


def output_bytes(sizes: Sizes) -> float:
    """Return the bytes of the final norm, and of the log-prob pass's hidden states and row statistics."""
    return norm_bytes(sizes, sizes.shard) + sizes.hidden * sizes.element + 40


def norm_bytes(sizes: Sizes, width: int) -> float:
    """Return the bytes that RMSNorm keeps besides its output: its input, and the normalised input unless fused."""
    if sizes.norm_is_one_function:
        return width * sizes.element + FP32
    return width * (FP32 + sizes.element) + FP32


def attention_bytes(sizes: Sizes, info: ModelInfo, recompute_core: bool) -> float:
    """Return the bytes that grouped-query attention keeps, without its norm."""
    element = sizes.element
    mixed = sizes.q + 2 * sizes.kv  # query, key and value are views of one tensor
    kept: float = mixed * element + (sizes.q + sizes.kv) * element  # the projection, and the rotated query and key
    if info.qk_norm:
        if sizes.fused:
            kept += (sizes.q + sizes.kv) * element
        elif sizes.norm_is_one_function:
            kept += sizes.q * element + (sizes.q + sizes.kv) / sizes.head * FP32  # keys are a view of the projection
        else:
            kept += (sizes.q + sizes.kv) * (element + FP32)
    if info.attention_gate:
        kept += sizes.q * (2 * element + FP32)  # the gate, its sigmoid, and the product
    if not sizes.fused:
        kept += 4 * sizes.head * element  # cosines and sines
    if sizes.context > 1 and not sizes.fused:
        # All ranks' keys and values instead of the rotated key, and of the projection unless the norm keeps it.
        kept += (2 * sizes.context - 1) * sizes.kv * element
        kept -= 0 if info.qk_norm and sizes.norm_is_one_function else mixed * element
    # The attention's output, and (unfused) the outputs of the sequences concatenated for the projection.
    outputs = 1 if sizes.fused or recompute_core else 2
    return kept + outputs * sizes.q * element + (0 if recompute_core else sizes.q / sizes.head * FP32)


def latent_attention_bytes(sizes: Sizes, mla: LatentAttention, recompute_core: bool) -> float:
    """Return the bytes that multi-head latent attention keeps, without its input norm."""
    element, split = sizes.element, sizes.hidden // sizes.shard
    heads = sizes.q // sizes.head
    kept = 4.0 * mla.rotated * element  # cosines and sines
    for rank in (mla.query_rank or 0, mla.kv_rank):  # norm and scaled result
        kept += norm_bytes(sizes, rank) / split + rank * element / split
    values = heads * mla.value
    padded = values if sizes.fused or recompute_core else sizes.q  # fused attention kernels need equal head sizes
    gathered = 1 if sizes.fused else sizes.context
    kept += (sizes.q + gathered * (sizes.q + padded)) * element
    if recompute_core:
        return kept + values * element
    return kept + heads * FP32 + (values if sizes.fused else values + padded) * element


def mlp_bytes(sizes: Sizes, width: int) -> float:
    """Return the bytes of both halves of the first product, and of the activation."""
    return 3 * width * sizes.element


def expert_bytes(sizes: Sizes, recompute_activation: bool) -> float:
    """Return the bytes that the router and the routed experts keep."""
    router = sizes.router * (FP32 + 1) + sizes.routed * 24
    rows = sizes.hidden + (sizes.moe_ffn * (2 if recompute_activation else 3))
    return router + sizes.routed * rows * sizes.element


def delta_net_bytes(delta: DeltaNet, tensor: int, element: int, *, fused: bool, rows: float = CHUNK_ROWS) -> float:
    """Return the bytes per packed token that a Gated DeltaNet layer keeps, without its input norm.

    `element`: bytes of one number. With fla's kernels (`fused`) it is an estimate.
    """
    heads, groups = delta.value_heads // tensor, delta.key_heads // tensor
    keys, values = delta.keys // tensor, delta.values // tensor
    mixed = 2 * keys + values
    kept: float = (mixed + values + 2 * heads) * element  # the projection
    kept += values * (3 * element + 2 * FP32)  # the norm, its scaled result, the gate's SiLU, and their product
    if fused:
        # The convolution's input, a query and a key for each value head, the values, a matrix of each chunk.
        return kept + (mixed + 2 * heads * delta.key_dim + values + heads * DELTA_CHUNK) * element
    kept += delta.conv * mixed * element  # the earlier tokens for the convolution, and its result
    kept += 2 * keys * FP32 + (0 if element == FP32 else (2 * keys + values) * FP32)  # the normalised, and fp32 copies
    # Inside a chunk: 4 matrices of a value head, 2 of a key head; right sides, solutions, queries, keys, additions.
    inside: float = (4 * heads + 2 * groups) * DELTA_CHUNK
    inside += 2 * heads * (delta.value_dim + delta.key_dim) + 2 * heads * delta.key_dim + 2 * keys + values
    inside += heads * delta.key_dim * delta.value_dim / DELTA_CHUNK  # the states between chunks
    return kept + rows * inside * FP32
