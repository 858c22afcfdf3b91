"""The parameters of each trainer rank, and the bytes of their weights, gradients and optimizer state.

Only sizes are computed. They follow Megatron-Core 0.16.1's modules, DDP buffers (distributed/param_and_grad_buffer.py)
and optimizers; tests compare them with models that are really built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.megatron_defaults import ddp_fields
from megarl.config.schema import Config
from megarl.models.info import LatentAttention, ModelInfo
from megarl.models.layout import Layout

FP32 = 4
DEFAULT_BUCKET = 40_000_000
DEFAULT_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True)
class Parameter:
    """One parameter of one rank; the gradient of an `expert` one is reduced over the expert data-parallel group."""

    name: str
    numel: int
    expert: bool = False
    own_bucket: bool = False  # for tied embeddings on the first and the last stage of a pipeline


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one rank holds during the whole run."""

    weights: int
    gradients: int
    optimizer: int


def bytes_per_element(precision: str) -> int:
    """Return the bytes of one number in the compute precision `bf16` or `fp32`."""
    return 2 if precision == "bf16" else FP32


def padded_vocabulary(info: ModelInfo, tensor: int) -> int:
    """Return the rows of the embedding: the vocabulary size rounded up to a multiple of TP."""
    return -(-info.vocab_size // tensor) * tensor


def chunk_layers(info: ModelInfo, layout: Layout, stage: int, chunk: int) -> range:
    """Return the global layer numbers of model chunk `chunk` on pipeline stage `stage`."""
    chunks = layout.virtual_pipeline or 1
    per_chunk = info.num_layers // (layout.pipeline * chunks)
    first = (chunk * layout.pipeline + stage) * per_chunk
    return range(first, first + per_chunk)


def chunk_parameters(info: ModelInfo, layout: Layout, stage: int, chunk: int) -> list[Parameter]:
    """Return the parameters of one model chunk on one rank of `stage`, in registration order."""
    last_chunk = (layout.virtual_pipeline or 1) - 1
    embeds = stage == 0 and chunk == 0
    predicts = stage == layout.pipeline - 1 and chunk == last_chunk
    embedding = padded_vocabulary(info, layout.tensor) // layout.tensor * info.hidden
    split_tie = info.tied and layout.pipeline > 1
    parameters: list[Parameter] = []
    if embeds:
        parameters.append(Parameter("embedding", embedding, own_bucket=split_tie))
    kinds: dict[bool, list[Parameter]] = {}  # of layers; a plan asks often, and a mixture has hundreds of parameters
    for layer in chunk_layers(info, layout, stage, chunk):
        moe = info.is_moe_layer(layer)
        if moe not in kinds:
            kinds[moe] = _layer(info, layout, moe=moe)
        parameters += kinds[moe]
    if predicts:
        parameters.append(Parameter("final_norm", info.hidden))
        if not (info.tied and embeds):
            parameters.append(Parameter("output", embedding, own_bucket=split_tie))
    return parameters


def _layer(info: ModelInfo, layout: Layout, *, moe: bool) -> list[Parameter]:
    tensor, hidden = layout.tensor, info.hidden
    attention = _latent_attention(info, info.mla, tensor) if info.mla else _attention(info, tensor)
    parameters = [Parameter("input_norm", hidden), *attention, Parameter("mlp_norm", hidden)]
    if not moe:
        share = info.ffn // tensor * hidden
        return [*parameters, Parameter("mlp.in", 2 * share), Parameter("mlp.out", share)]
    experts = info.num_experts or 0
    parameters.append(Parameter("router", experts * hidden))
    share = info.moe_ffn // layout.etp * hidden
    apart = layout.expert > 1
    for _ in range(experts // layout.expert):
        parameters += [Parameter("expert.in", 2 * share, apart), Parameter("expert.out", share, apart)]
    if info.shared_ffn:
        share = info.shared_ffn // tensor * hidden
        parameters += [Parameter("shared_experts.in", 2 * share), Parameter("shared_experts.out", share)]
    return parameters


def _attention(info: ModelInfo, tensor: int) -> list[Parameter]:
    q, kv = info.heads * info.head_dim, info.kv_heads * info.head_dim
    parameters = [
        Parameter("attention.out", q // tensor * info.hidden),
        Parameter("attention.qkv", (q + 2 * kv) // tensor * info.hidden),
    ]
    if info.qkv_bias:
        parameters.append(Parameter("attention.qkv_bias", (q + 2 * kv) // tensor))
    if info.qk_norm:
        parameters += [Parameter(f"attention.{name}_norm", info.head_dim) for name in "qk"]
    return parameters


def _latent_attention(info: ModelInfo, mla: LatentAttention, tensor: int) -> list[Parameter]:
    heads, rank = info.heads // tensor, mla.query_rank
    queries = heads * info.head_dim
    parameters = [Parameter("attention.out", heads * mla.value * info.hidden)]
    if rank is None:
        parameters.append(Parameter("attention.q", queries * info.hidden))
    else:
        parameters.append(Parameter("attention.q_down", rank // tensor * info.hidden))
        parameters.append(Parameter("attention.q_up", queries * rank))
    parameters.append(Parameter("attention.kv_down", (mla.kv_rank + mla.rotated) // tensor * info.hidden))
    parameters.append(Parameter("attention.kv_up", heads * (mla.plain + mla.value) * mla.kv_rank))
    if rank is not None:
        parameters.append(Parameter("attention.q_norm", rank))
    parameters.append(Parameter("attention.kv_norm", mla.kv_rank))
    return parameters


def model_parameters(info: ModelInfo) -> tuple[int, int]:
    """Return the number of parameters of the model, and of those active for one token (embeddings included)."""
    single = Layout()
    total = sum(p.numel for p in chunk_parameters(info, single, 0, 0))
    active = total
    for layer in range(info.num_layers):
        if info.is_moe_layer(layer):
            active -= ((info.num_experts or 0) - info.topk) * 3 * info.moe_ffn * info.hidden
    return total, active


def state_bytes(config: Config, info: ModelInfo, layout: Layout, stage: int) -> StateBytes:
    """Return weights, gradients and optimizer state of the rank of a pipeline stage that holds most.

    Weights are in the compute precision, gradients in fp32 unless `megatron.ddp.grad_reduce_in_fp32` is false. The
    optimizer state is Adam's two moments in fp32, and with bf16 also the fp32 master weights. The distributed optimizer
    shards its state over the data-parallel ranks and pads the buffers of weights and gradients.
    """
    element = bytes_per_element(config.trainer.precision)
    in_fp32 = bool(ddp_fields(config)["grad_reduce_in_fp32"])
    gradient = FP32 if in_fp32 else element
    per_parameter = 2 * FP32 + (FP32 if element != FP32 else 0)
    weights = gradients = optimizer = 0
    for chunk in range(layout.virtual_pipeline or 1):
        parameters = chunk_parameters(info, layout, stage, chunk)
        for expert, ranks in ((False, layout.data), (True, layout.expert_data)):
            own = [p for p in parameters if p.expert == expert]
            if not own:
                continue
            size = _bucket_size(config, layout.data, stage, chunk)
            buffer, shard = _buffer(own, ranks, size, config)
            weights += buffer * element
            gradients += buffer * gradient
            optimizer += shard * per_parameter
    return StateBytes(weights, gradients, optimizer)


def _bucket_size(config: Config, ranks: int, stage: int, chunk: int) -> int | None:
    """Return the elements per DDP bucket; None means a single bucket (no overlap, later stages, later chunks)."""
    ddp = ddp_fields(config)
    if not ddp["overlap_grad_reduce"] or stage > 0 or chunk > 0:
        return None
    return ddp.get("bucket_size") or max(DEFAULT_BUCKET, DEFAULT_BUCKET_PER_RANK * ranks)


def _buffer(parameters: Sequence[Parameter], ranks: int, bucket_size: int | None, config: Config) -> tuple[int, int]:
    """Return the elements of the contiguous buffer, and the parameter elements of the largest optimizer shard."""
    if not config.trainer.optimizer.distributed:
        total = sum(p.numel for p in parameters)
        return total, total
    multiple = math.lcm(ranks, 128)
    if config.megatron.ddp.get("pad_buckets_for_high_nccl_busbw"):
        multiple = math.lcm(multiple, 2**16)
    buckets: list[list[tuple[int, int]]] = [[]]
    position = bucket_start = 0
    ends: list[int] = []

    def close(end: int) -> int:
        nonlocal bucket_start
        bucket_start = _round_up(end, multiple)
        ends.append(bucket_start)
        buckets.append([])
        return bucket_start

    for parameter in reversed(parameters):
        position = _round_up(position, 64)
        if parameter.own_bucket and buckets[-1]:
            position = close(position)
        start, position = position, position + parameter.numel
        buckets[-1].append((start, position))
        full = bucket_size is not None and position - bucket_start >= bucket_size
        if full or parameter.own_bucket:
            position = close(position)
    if buckets[-1]:
        close(position)
    return ends[-1], _fullest_shard(buckets, ends, ranks)


def _fullest_shard(buckets: list[list[tuple[int, int]]], ends: list[int], ranks: int) -> int:
    """Return the parameter elements of the rank with most; every bucket is divided into `ranks` equal ranges."""
    held = [0] * ranks
    start = 0
    for spans, end in zip(buckets, ends, strict=False):
        width = (end - start) // ranks
        for low, high in spans:
            for rank in range((low - start) // width, (high - 1 - start) // width + 1):
                first = start + rank * width
                held[rank] += min(high, first + width) - max(low, first)
        start = end
    return max(held)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
