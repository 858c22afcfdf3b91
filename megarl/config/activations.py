"""Bytes that a forward pass keeps for its backward pass, by what each module of Megatron-Core saves.

Two kinds of model: `fused` is Transformer Engine's layer spec (GPUs), the other is Megatron's own modules
with megarl's RMSNorm and packed attention. Sizes are per packed token; experts are taken as evenly loaded. Tests
compare the unfused kind with the tensors that autograd really saves; the fused one is from the source only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.parameters import FP32, bytes_per_element, chunk_layers, padded_vocabulary
from megarl.config.schema import Config
from megarl.models.info import LatentAttention, ModelInfo
from megarl.models.layout import Layout


@dataclass(frozen=True)
class _Sizes:
    """Elements per packed token on one rank; `shard` is the hidden size, split under sequence parallelism."""

    hidden: int
    shard: int
    q: int
    kv: int
    head: int
    ffn: int
    moe_ffn: int
    shared_ffn: int
    routed: float  # expert rows per packed token
    router: int
    element: int
    fused: bool

    @classmethod
    def of(cls, config: Config, info: ModelInfo, layout: Layout, fused: bool) -> _Sizes:
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
            routed=info.topk * layout.etp / split,
            router=(info.num_experts or 0) // split,
            element=bytes_per_element(config.trainer.precision),
            fused=fused,
        )


def saved_per_token(config: Config, info: ModelInfo, layout: Layout, layer: int, fused: bool) -> float:
    """Bytes per packed token that one layer keeps, under the recompute settings of `megatron.transformer`."""
    sizes = _Sizes.of(config, info, layout, fused)
    passed = config.megatron.transformer
    selective = passed.get("recompute_granularity") == "selective"
    modules = set(passed.get("recompute_modules") or ["core_attn"]) if selective else set()
    if info.mla:
        total = _latent_attention(sizes, info.mla, "core_attn" in modules)
    else:
        total = _attention(sizes, info, "core_attn" in modules)
    norm = _norm(sizes, sizes.shard)
    total += norm * (1 if "layernorm" not in modules else 0)
    if not info.is_moe_layer(layer):
        # The MLP's input is the norm's output, kept by the first linear layer or by the checkpoint around it.
        total += sizes.shard * sizes.element + (0 if "mlp" in modules else _mlp(sizes, sizes.ffn))
    else:
        total += sizes.shard * sizes.element
        if "moe" not in modules:
            total += _experts(sizes, "moe_act" in modules) + _mlp(sizes, sizes.shared_ffn)
    total += norm * (1 if "layernorm" not in modules else 0) + sizes.shard * sizes.element
    return total


def chunk_bytes(config: Config, info: ModelInfo, layout: Layout, stage: int, chunk: int, *, fused: bool) -> float:
    """Bytes that one micro-batch of `trainer.micro_batch_tokens` keeps in one model chunk."""
    tokens = config.trainer.micro_batch_tokens
    sizes = _Sizes.of(config, info, layout, fused)
    layers = list(chunk_layers(info, layout, stage, chunk))
    passed = config.megatron.transformer
    per_token = [saved_per_token(config, info, layout, layer, fused) for layer in layers]
    if passed.get("recompute_granularity") == "full":
        count = int(passed.get("recompute_num_layers") or 1)
        boundary = float(sizes.hidden * sizes.element)
        boundary /= layout.tensor if layout.sequence or passed.get("distribute_saved_activations") else 1
        if passed.get("recompute_method") == "block":
            kept = boundary * min(count, len(layers)) + sum(per_token[count:])
        else:
            kept = boundary * -(-len(layers) // count)
    else:
        kept = sum(per_token)
    predicts = stage == layout.pipeline - 1 and chunk == (layout.virtual_pipeline or 1) - 1
    if predicts:
        kept += _output_per_token(sizes)
    if stage == 0 and chunk == 0:
        kept += 8
    return kept * tokens


def recompute_bytes(config: Config, info: ModelInfo, layout: Layout, stage: int, *, fused: bool) -> float:
    """What backward recomputes at one time, on top of what forward kept.

    By then the output's part is released, and with the method `block`, which recomputes a stage's first layers,
    also the other layers.
    """
    passed = config.megatron.transformer
    granularity = passed.get("recompute_granularity")
    if granularity is None:
        return 0.0
    plain = config.model_copy(update={"megatron": config.megatron.model_copy(update={"transformer": {}})})
    chunks = range(layout.virtual_pipeline or 1)
    layers = [layer for chunk in chunks for layer in chunk_layers(info, layout, stage, chunk)]
    whole = max(saved_per_token(plain, info, layout, layer, fused) for layer in layers)
    released = _output_per_token(_Sizes.of(config, info, layout, fused)) if stage == layout.pipeline - 1 else 0.0
    if granularity == "full":
        count = int(passed.get("recompute_num_layers") or 1)
        per_chunk = len(layers) // len(chunks)
        if passed.get("recompute_method") == "block":
            released += whole * max(0, per_chunk - count)
            count = 1
        working = whole * min(count, per_chunk)
    else:
        working = whole - min(saved_per_token(config, info, layout, layer, fused) for layer in layers)
    return max(0.0, working - released) * config.trainer.micro_batch_tokens


def _output_per_token(sizes: _Sizes) -> float:
    """Final norm, the hidden states that the chunked log-prob pass keeps, and its few numbers per row."""
    return _norm(sizes, sizes.shard) + sizes.hidden * sizes.element + 40


def in_flight_chunks(layout: Layout, stage: int, micro_batches: int | None = None) -> int:
    """Chunk passes of which a rank of `stage` holds activations at the worst moment (1F1B or interleaved)."""
    if layout.virtual_pipeline is None:
        deepest = layout.pipeline - stage
        return deepest if micro_batches is None else min(deepest, micro_batches)
    warmup = (layout.pipeline - stage - 1) * 2 + (layout.virtual_pipeline - 1) * layout.pipeline
    total = warmup + 1
    return total if micro_batches is None else min(total, micro_batches * layout.virtual_pipeline)


def peak_bytes(config: Config, info: ModelInfo, layout: Layout, stage: int, *, fused: bool) -> float:
    """Activations of a rank of `stage` at its worst moment, the pipeline being full of micro-batches."""
    chunks = layout.virtual_pipeline or 1
    sizes = [chunk_bytes(config, info, layout, stage, chunk, fused=fused) for chunk in range(chunks)]
    return sum(sizes) / chunks * in_flight_chunks(layout, stage)


def logits_bytes(config: Config, info: ModelInfo, layout: Layout) -> int:
    """Working set of one chunk of the log-prob pass and its backward, and the output weight's gradient."""
    columns = padded_vocabulary(info, layout.tensor) // layout.tensor
    element = bytes_per_element(config.trainer.precision)
    rows = min(config.trainer.logprob_chunk_tokens, config.trainer.micro_batch_tokens)
    # fp32 logits, exponentials and gradient, and the matrix product in compute precision, in and out.
    chunk = rows * columns * (3 * FP32 + 2 * element)
    # The weight's gradient is summed over chunks in fp32; in bf16 each product and the result are tensors
    # too.
    weight = columns * info.hidden * (FP32 + (2 * element if element != FP32 else 0))
    return chunk + weight


def _norm(sizes: _Sizes, width: int) -> float:
    """What RMSNorm keeps besides its output: its input, and (unfused) the normalised input."""
    if sizes.fused:
        return width * sizes.element + FP32
    return width * (FP32 + sizes.element) + FP32


def _attention(sizes: _Sizes, info: ModelInfo, recompute_core: bool) -> float:
    element = sizes.element
    mixed = sizes.q + 2 * sizes.kv  # query, key and value are views of one tensor
    kept = mixed * element + (sizes.q + sizes.kv) * element  # values; rotated query and key
    if info.qk_norm:
        if sizes.fused:
            kept += (sizes.q + sizes.kv) * element
        else:
            kept += (sizes.q + sizes.kv) * element + (0 if element == FP32 else (sizes.q + sizes.kv) * FP32)
            kept += sizes.q * element if element == FP32 else 0
    if not sizes.fused:
        kept += 4 * sizes.head * element  # cosines and sines
    # The output, and (unfused) the sequences' outputs joined for the projection.
    outputs = 1 if sizes.fused or recompute_core else 2
    return kept + outputs * sizes.q * element + (0 if recompute_core else sizes.q / sizes.head * FP32)


def _latent_attention(sizes: _Sizes, mla: LatentAttention, recompute_core: bool) -> float:
    element, split = sizes.element, sizes.hidden // sizes.shard
    heads = sizes.q // sizes.head
    kept = 4.0 * mla.rotated * element  # cosines and sines
    for rank, made in ((mla.query_rank or 0, mla.query_rank or 0), (mla.kv_rank, mla.kv_rank + mla.rotated)):
        # Norm and the scaled result. In fp32 its input is a view of what was gathered over the tensor-parallel ranks.
        kept += _norm(sizes, rank) / split + rank * element / split
        if not sizes.fused and element == FP32:
            kept += made * FP32 - rank * FP32 / split
    values = heads * mla.value
    padded = values if sizes.fused or recompute_core else sizes.q  # the fused kernels take one head size
    kept += (2 * sizes.q + padded) * element
    if recompute_core:
        return kept + values * element
    return kept + heads * FP32 + (values if sizes.fused else values + padded) * element


def _mlp(sizes: _Sizes, width: int) -> float:
    """Both halves of the first product, and its activation; unfused also the steps between."""
    return (3 if sizes.fused else 5) * width * sizes.element


def _experts(sizes: _Sizes, recompute_activation: bool) -> float:
    router = sizes.router * (FP32 + 1) + sizes.routed * 24
    rows = sizes.hidden + (sizes.moe_ffn * (2 if recompute_activation else 3 if sizes.fused else 6))
    return router + sizes.routed * rows * sizes.element
