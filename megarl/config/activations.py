"""Bytes that a forward pass keeps for its backward pass, counted by the tensors that Megatron-Core's modules save.

There are two kinds of model: `fused` is Transformer Engine's layer spec (GPUs), the other kind uses Megatron's own
modules with megarl's RMSNorm and packed attention, on a CPU (in fp32 on a GPU its norms keep one tensor more). Sizes
are per packed token, and the experts are assumed to be evenly loaded. Tests compare the unfused kind with the tensors
that autograd saves; the fused kind is derived from the source only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.megatron_defaults import transformer_fields
from megarl.config.parameters import FP32, bytes_per_element, chunk_layers, padded_vocabulary
from megarl.config.schema import Config
from megarl.models.info import LatentAttention, ModelInfo
from megarl.models.layout import Layout


@dataclass(frozen=True)
class _Sizes:
    """Elements per packed token on one rank; `shard` is the hidden size, divided by TP under sequence parallelism."""

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

    @property
    def norm_is_one_function(self) -> bool:
        """True for a norm that keeps its input only: Transformer Engine's, and that of a CPU in fp32."""
        return self.fused or self.element == FP32

    @classmethod
    def of(cls, config: Config, info: ModelInfo, layout: Layout, fused: bool, load: float = 1.0) -> _Sizes:
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
            routed=load * info.topk * layout.etp / split,
            router=(info.num_experts or 0) // split,
            element=bytes_per_element(config.trainer.precision),
            fused=fused,
        )


def saved_per_token(
    config: Config, info: ModelInfo, layout: Layout, layer: int, fused: bool, load: float = 1.0
) -> float:
    """Return the bytes per packed token that one layer keeps under the config's recompute settings.

    `load`: rows of this rank's experts, relative to an even distribution.
    """
    sizes = _Sizes.of(config, info, layout, fused, load)
    passed = transformer_fields(config)
    selective = passed.get("recompute_granularity") == "selective"
    modules = set(passed.get("recompute_modules") or ["core_attn"]) if selective else set()
    if info.mla:
        total = _latent_attention(sizes, info.mla, "core_attn" in modules)
    else:
        total = _attention(sizes, info, "core_attn" in modules)
    norm = _norm(sizes, sizes.shard)
    total += norm * (1 if "layernorm" not in modules else 0)
    if not info.is_moe_layer(layer):
        # The MLP's input is the norm's output, which the first linear layer keeps, or the recomputed block around it.
        total += sizes.shard * sizes.element + (0 if "mlp" in modules else _mlp(sizes, sizes.ffn))
    else:
        total += sizes.shard * sizes.element
        if "moe" not in modules:
            total += _experts(sizes, "moe_act" in modules) + _mlp(sizes, sizes.shared_ffn)
    total += norm * (1 if "layernorm" not in modules else 0) + sizes.shard * sizes.element
    return total


def forward_per_token(config: Config, info: ModelInfo, layout: Layout, layer: int, fused: bool) -> float:
    """Return the bytes per packed token that live at one time while one layer runs without gradients.

    They are those of its attention or of its MLP, whichever is larger, of the norm before it, and of two hidden states:
    the residual and the layer's input. It is an estimate: within a module, some tensors are freed earlier. Without
    Transformer Engine the experts run one after the other.
    """
    sizes = _Sizes.of(config, info, layout, fused)
    attention = _latent_attention(sizes, info.mla, False) if info.mla else _attention(sizes, info, False)
    if info.qk_norm and not info.mla and not sizes.norm_is_one_function:
        attention -= (sizes.q + sizes.kv) * FP32  # the normalised queries and keys end before attention begins
    width = sizes.shared_ffn if info.is_moe_layer(layer) else sizes.ffn
    mlp = _mlp(sizes, width) + (0 if fused else width * sizes.element)  # the activated half, beside its product
    if info.is_moe_layer(layer):
        mlp += _experts(sizes, False)
        if not fused:
            rows = sizes.routed * sizes.element
            others = 1 - layout.expert / (info.num_experts or 1)  # the share of rows that the running expert lacks
            # The outputs of all experts, separate and joined, and of their steps only those of the running one, which
            # are three more than a backward pass needs: activated, product, weighed.
            mlp += rows * (2 * sizes.hidden + 3 * sizes.moe_ffn - 6 * sizes.moe_ffn * others)
    return max(attention, mlp) + _norm(sizes, sizes.shard) + 2 * sizes.shard * sizes.element


def without_recompute(config: Config) -> Config:
    """Return `config` with every activation kept."""
    return config.model_copy(
        update={
            "megatron": config.megatron.model_copy(update={"transformer": {}}),
            "trainer": config.trainer.model_copy(update={"recompute": "none"}),
        }
    )


def chunk_bytes(
    config: Config, info: ModelInfo, layout: Layout, stage: int, chunk: int, *, fused: bool, load: float = 1.0
) -> float:
    """Return the bytes that one micro-batch of `trainer.micro_batch_tokens` keeps in one model chunk."""
    tokens = config.trainer.token_limit
    sizes = _Sizes.of(config, info, layout, fused)
    layers = list(chunk_layers(info, layout, stage, chunk))
    passed = transformer_fields(config)
    per_token = [saved_per_token(config, info, layout, layer, fused, load) for layer in layers]
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
    """Return the bytes that backward recomputes at one time, in addition to those that forward kept.

    At that time the tensors of the output layer are already released. With the method `block`, which recomputes the
    first layers of a stage, those of the other layers are released as well.
    """
    passed = transformer_fields(config)
    granularity = passed.get("recompute_granularity")
    if granularity is None:
        return 0.0
    plain = without_recompute(config)
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
    return max(0.0, working - released) * config.trainer.token_limit


def _output_per_token(sizes: _Sizes) -> float:
    """Return the bytes of the final norm, and of the hidden states and row statistics that the log-prob pass keeps."""
    return _norm(sizes, sizes.shard) + sizes.hidden * sizes.element + 40


def in_flight_chunks(layout: Layout, stage: int) -> int:
    """Return the largest number of chunk passes whose activations a rank of `stage` holds (1F1B or interleaved)."""
    if layout.virtual_pipeline is None:
        return layout.pipeline - stage
    warmup = (layout.pipeline - stage - 1) * 2 + (layout.virtual_pipeline - 1) * layout.pipeline
    return warmup + 1


def peak_bytes(config: Config, info: ModelInfo, layout: Layout, stage: int, *, fused: bool, load: float = 1.0) -> float:
    """Return the largest number of bytes of activations of a rank of `stage`, with a full pipeline."""
    chunks = layout.virtual_pipeline or 1
    sizes = [chunk_bytes(config, info, layout, stage, chunk, fused=fused, load=load) for chunk in range(chunks)]
    return sum(sizes) / chunks * in_flight_chunks(layout, stage)


def logits_bytes(config: Config, info: ModelInfo, layout: Layout, *, update: bool) -> int:
    """Return the bytes of one chunk of the log-prob head: of a forward pass, or of an `update` with its backward pass.

    They are those of the separate operations on a whole chunk (trainer/logprobs.py). The compiled head needs less, and
    so does a CPU, which makes the exponentials of a part of the chunk at a time.
    """
    columns = padded_vocabulary(info, layout.tensor) // layout.tensor
    rows = min(config.trainer.logprob_chunk_tokens, config.trainer.token_limit)
    element = bytes_per_element(config.trainer.precision)
    copy = element if element != FP32 else 0  # beside a tensor in fp32, the same one in compute precision
    weighed = config.algorithm.entropy_coef > 0
    # fp32 logits, which the products that the entropy needs overwrite; for it also their exponentials.
    forward = rows * columns * (copy + FP32)
    if not update:
        return forward
    if weighed or config.telemetry.entropy_every:
        forward += rows * columns * FP32
    # The logits, their fp32 copy, which becomes the gradient, and that in compute precision or the entropy's factor.
    weight = columns * info.hidden
    gradient = rows * columns * (copy + FP32 + max(copy, FP32 if weighed else 0)) + weight * FP32
    # The weight's gradient is summed over chunks in fp32; the product of one chunk, and the result, are in bf16.
    backward = max(gradient, rows * columns * copy + weight * (FP32 + copy))
    return max(forward, backward)


def _norm(sizes: _Sizes, width: int) -> float:
    """Return the bytes that RMSNorm keeps besides its output: of its input, and else of the normalised input too."""
    if sizes.norm_is_one_function:
        return width * sizes.element + FP32
    return width * (FP32 + sizes.element) + FP32


def _attention(sizes: _Sizes, info: ModelInfo, recompute_core: bool) -> float:
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
    if not sizes.fused:
        kept += 4 * sizes.head * element  # cosines and sines
    # The attention's output, and (unfused) the outputs of the sequences concatenated for the projection.
    outputs = 1 if sizes.fused or recompute_core else 2
    return kept + outputs * sizes.q * element + (0 if recompute_core else sizes.q / sizes.head * FP32)


def _latent_attention(sizes: _Sizes, mla: LatentAttention, recompute_core: bool) -> float:
    """Return the bytes that multi-head latent attention keeps, without its input norm."""
    element, split = sizes.element, sizes.hidden // sizes.shard
    heads = sizes.q // sizes.head
    kept = 4.0 * mla.rotated * element  # cosines and sines
    for rank, made in ((mla.query_rank or 0, mla.query_rank or 0), (mla.kv_rank, mla.kv_rank + mla.rotated)):
        # Norm and scaled result. In fp32 the norm's input is a view of the tensor gathered over the TP ranks.
        kept += _norm(sizes, rank) / split + rank * element / split
        if not sizes.fused and element == FP32:
            kept += made * FP32 - rank * FP32 / split
    values = heads * mla.value
    padded = values if sizes.fused or recompute_core else sizes.q  # fused attention kernels need equal head sizes
    kept += (2 * sizes.q + padded) * element
    if recompute_core:
        return kept + values * element
    return kept + heads * FP32 + (values if sizes.fused else values + padded) * element


def _mlp(sizes: _Sizes, width: int) -> float:
    """Return the bytes of both halves of the first product, and of the activation."""
    return 3 * width * sizes.element


def _experts(sizes: _Sizes, recompute_activation: bool) -> float:
    """Return the bytes that the router and the routed experts keep."""
    router = sizes.router * (FP32 + 1) + sizes.routed * 24
    rows = sizes.hidden + (sizes.moe_ffn * (2 if recompute_activation else 3))
    return router + sizes.routed * rows * sizes.element
