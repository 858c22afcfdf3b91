"""The parameters of each trainer rank, the bytes of their state, and the activations kept for the backward pass.

Sizes follow Megatron-Core's modules and optimizers; tests compare them with real models.
"""

from __future__ import annotations

import functools
import math
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megarl.common.values import FP32
from megarl.config.derived.teachers import trainer_teachers
from megarl.config.megatron.reserved import ddp_fields, transformer_fields
from megarl.config.memory_plan.activations import (
    Sizes,
    attention_bytes,
    delta_net_bytes,
    expert_bytes,
    latent_attention_bytes,
    mlp_bytes,
    norm_bytes,
    output_bytes,
)
from megarl.config.schema import LOGPROB_CHUNK_ROWS, Config, MegatronConfig, TrainerConfig, WeightSyncConfig
from megarl.models.architecture.architecture import DeltaNet, LatentAttention, ModelInfo
from megarl.models.families import FAMILIES
from megarl.models.families.vision import FEATURE_CACHE_BYTES, Trained, trains
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.layout import Layout


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


def chunk_parameters(info: ModelInfo, layout: Layout, stage: int, chunk: int) -> tuple[int, int]:
    """Return a rank's parameters of one model chunk of `stage`: (all but split experts, split experts).

    Split experts have other data-parallel ranks.
    """
    hidden, tensor, layers = info.hidden, layout.tensor, layout.chunk_layers(info.num_layers, stage, chunk)
    mixtures = sum(map(info.is_moe_layer, layers))
    attention = _latent_attention(info, info.mla, tensor) if info.mla else _attention(info, tensor)
    delta = _delta_net_parameters(info.delta, hidden, tensor) if info.delta else 0
    held = sum((delta if info.is_delta_layer(each) else attention) + 2 * hidden for each in layers)  # with both norms
    held += (len(layers) - mixtures) * 3 * (info.ffn // tensor) * hidden
    router = (info.num_experts or 0) + info.shared_expert_gate
    held += mixtures * (router + 3 * (info.shared_ffn // tensor)) * hidden  # router, shared experts
    embedding = padded_vocabulary(info, tensor) // tensor * hidden
    embeds = stage == 0 and chunk == 0
    held += embedding + tower_parameters(info, "all") if embeds else 0
    if stage == layout.pipeline - 1 and chunk == (layout.virtual_pipeline or 1) - 1:
        held += hidden + (0 if info.tied and embeds else embedding)  # the final norm, and the output layer
    experts = mixtures * ((info.num_experts or 0) // layout.expert) * 3 * (info.moe_ffn // layout.etp) * hidden
    return (held, experts) if layout.expert > 1 else (held + experts, 0)


def _delta_net_parameters(delta: DeltaNet, hidden: int, tensor: int) -> int:
    """Return the parameters of a Gated DeltaNet layer on one of `tensor` ranks."""
    held = (2 * delta.keys + 3 * delta.values + 2 * delta.value_heads) // tensor * hidden
    return held + ((2 * delta.keys + delta.values) * delta.conv + 2 * delta.value_heads) // tensor + delta.value_dim


def tower_parameters(info: ModelInfo, trained: Trained) -> int:
    """Return how many parameters of the vision tower `model.vision.train` trains, on each rank of stage 0."""
    rules = [rule for rule in FAMILIES[info.family].vision(info) if trains(rule.megatron, trained)]
    return sum(math.prod(info.dims[size] for size in rule.sources[0].shape.split()) for rule in rules)


def _attention(info: ModelInfo, tensor: int) -> int:
    """Return the parameters of grouped-query attention on one rank."""
    q, kv = info.heads * info.head_dim, info.kv_heads * info.head_dim
    held = ((3 if info.attention_gate else 2) * q + 2 * kv) // tensor * info.hidden
    held += (q + 2 * kv) // tensor if info.qkv_bias else 0
    return held + (2 * info.head_dim if info.qk_norm else 0)


def _latent_attention(info: ModelInfo, mla: LatentAttention, tensor: int) -> int:
    """Return the parameters of multi-head latent attention on one rank."""
    heads, rank = info.heads // tensor, mla.query_rank
    queries = heads * info.head_dim
    held = heads * mla.value * info.hidden + (mla.kv_rank + mla.rotated) // tensor * info.hidden
    held += heads * (mla.plain + mla.value) * mla.kv_rank + mla.kv_rank
    if rank is None:
        return held + queries * info.hidden
    return held + rank // tensor * info.hidden + queries * rank + rank


def model_parameters(info: ModelInfo) -> tuple[int, int]:
    """Return the number of parameters, and of those active for one token (including embeddings)."""
    single = Layout()
    total, _ = chunk_parameters(info, single, 0, 0)
    active = total
    for layer in range(info.num_layers):
        if info.is_moe_layer(layer):
            active -= ((info.num_experts or 0) - info.topk) * 3 * info.moe_ffn * info.hidden
    return total, active


@dataclass(frozen=True)
class FrozenModel:
    """A model that the trainer's ranks hold but do not train. `name`: of its weights; `placement`: where they are."""

    name: str
    placement: str
    info: ModelInfo


@dataclass(frozen=True)
class TrainerRank:
    """A rank of the trainer: its models, its layout, and how it trains.

    `fused`: the kind of model, see above. `weighs_entropy`: the loss contains the entropy.
    """

    info: ModelInfo
    layout: Layout
    trainer: TrainerConfig
    megatron: MegatronConfig
    weighs_entropy: bool
    fused: bool
    sync: WeightSyncConfig
    frozen: tuple[FrozenModel, ...]
    trains_vision: Trained = "projector"
    step_patches: int = 0  # the most vision patches of all images of a step

    @classmethod
    def of(cls, config: Config, info: ModelInfo, layout: Layout, *, fused: bool) -> TrainerRank:
        """Return a rank of the trainer of a config."""
        place = config.reference.placement
        reference = FrozenModel("reference weights", place, info)
        frozen = [reference] if config.needs_reference else []
        for each in trainer_teachers(config.teachers):
            with suppress(ValueError):  # its config.json is not on this machine
                frozen.append(FrozenModel(f"weights of teacher {each.name}", place, load_info(each.path)))
        weighs_entropy = config.algorithm.entropy_coef > 0
        vision, batch = config.model.vision, config.batch
        images = batch.groups * batch.samples_per_group * vision.images_per_prompt
        patches = images * (vision.max_pixels // info.vision.patch**2) if info.vision else 0
        return cls(
            info, layout, config.trainer, config.megatron, weighs_entropy, fused, config.weight_sync, tuple(frozen),
            vision.train, patches,
        )  # fmt: skip

    def with_trainer(self, **fields: object) -> TrainerRank:
        """Return this rank with other fields of the section `trainer`."""
        return replace(self, trainer=self.trainer.model_copy(update=fields))

    @property
    def element(self) -> int:
        """The bytes of one number in the compute precision."""
        return bytes_per_element(self.trainer.precision)

    @property
    def tokens(self) -> int:
        """The most tokens of a micro-batch on this rank: with context parallelism its share."""
        return -(-self.trainer.token_limit // self.layout.context)

    @functools.cached_property
    def transformer(self) -> dict[str, Any]:
        """The fields of Megatron's TransformerConfig."""
        return transformer_fields(self.trainer, self.megatron)

    def state_bytes(self, stage: int) -> StateBytes:
        """Return weights, gradients and optimizer state of the rank of a pipeline stage that holds most.

        Weights are in the compute precision, gradients in fp32 unless `megatron.ddp.grad_reduce_in_fp32` is false. The
        optimizer state is Adam's two moments in fp32, with bf16 also fp32 master weights. The distributed optimizer
        shards it over the ranks that hold the same parameters; buffer padding is not counted.
        """
        gradient = FP32 if ddp_fields(self.trainer, self.megatron)["grad_reduce_in_fp32"] else self.element
        per_parameter = 2 * FP32 + (FP32 if self.element != FP32 else 0)
        weights = gradients = optimizer = 0
        for chunk in range(self.layout.virtual_pipeline or 1):
            held, experts = chunk_parameters(self.info, self.layout, stage, chunk)
            frozen = self._frozen_parameters if stage == chunk == 0 else 0
            for numel, fixed, ranks in ((held, frozen, self.layout.dense_data), (experts, 0, self.layout.expert_data)):
                weights += numel * self.element
                gradients += (numel - fixed) * gradient
                shard = -(-(numel - fixed) // ranks) if self.trainer.optimizer.distributed else numel - fixed
                optimizer += shard * per_parameter
        return StateBytes(weights, gradients, optimizer)

    @property
    def _frozen_parameters(self) -> int:
        """The parameters of the vision tower that are not trained."""
        return tower_parameters(self.info, "all") - tower_parameters(self.info, self.trains_vision)

    def _sizes(self, load: float = 1.0) -> Sizes:
        return Sizes.of(self.info, self.layout, self.element, fused=self.fused, load=load)

    def saved_per_token(self, layer: int, load: float = 1.0) -> float:
        """Return the bytes per packed token that one layer keeps under the config's recompute settings.

        `load`: rows of this rank's experts, relative to an even distribution.
        """
        sizes = self._sizes(load)
        passed = self.transformer
        selective = passed.get("recompute_granularity") == "selective"
        modules = set(passed.get("recompute_modules") or ["core_attn"]) if selective else set()
        if self.info.delta and self.info.is_delta_layer(layer):
            total = delta_net_bytes(self.info.delta, self.layout.tensor, sizes.element, fused=sizes.fused)
        elif self.info.mla:
            total = latent_attention_bytes(sizes, self.info.mla, "core_attn" in modules)
        else:
            total = attention_bytes(sizes, self.info, "core_attn" in modules)
        norm = norm_bytes(sizes, sizes.shard)
        total += norm * (1 if "layernorm" not in modules else 0)
        if not self.info.is_moe_layer(layer):
            # The MLP's input is the norm's output, kept by the first linear layer or by the recomputed block.
            total += sizes.shard * sizes.element + (0 if "mlp" in modules else mlp_bytes(sizes, sizes.ffn))
        else:
            total += sizes.shard * sizes.element
            if "moe" not in modules:
                total += expert_bytes(sizes, "moe_act" in modules) + mlp_bytes(sizes, sizes.shared_ffn)
        total += norm * (1 if "layernorm" not in modules else 0) + sizes.shard * sizes.element
        return total

    def forward_per_token(self, layer: int) -> float:
        """Return the peak bytes per packed token of one layer without gradients.

        Those of its attention or its MLP, whichever is larger, of the norm before, and of two hidden states: residual
        and input. An estimate: modules free some tensors earlier.
        """
        sizes, info = self._sizes(), self.info
        attention = attention_bytes(sizes, info, False)
        if info.delta and info.is_delta_layer(layer):
            attention = delta_net_bytes(info.delta, self.layout.tensor, sizes.element, fused=sizes.fused, rows=1.0)
        elif info.mla:
            attention = latent_attention_bytes(sizes, info.mla, False)
        elif info.qk_norm and not sizes.norm_is_one_function:
            attention -= (sizes.q + sizes.kv) * FP32  # the normalised queries and keys end before attention begins
        width = sizes.shared_ffn if info.is_moe_layer(layer) else sizes.ffn
        mlp = mlp_bytes(sizes, width)
        if not self.fused:
            mlp += width * sizes.element  # the activated half, alongside its product
        if info.is_moe_layer(layer):
            mlp += expert_bytes(sizes, False)
            if not self.fused:
                mlp += sizes.routed * sizes.hidden * sizes.element  # the experts' outputs
        return max(attention, mlp) + norm_bytes(sizes, sizes.shard) + 2 * sizes.shard * sizes.element

    def _without_recompute(self) -> TrainerRank:
        """Return this rank with every activation kept."""
        megatron = self.megatron.model_copy(update={"transformer": {}})
        return replace(self.with_trainer(recompute="none"), megatron=megatron)

    def chunk_bytes(self, stage: int, chunk: int, load: float = 1.0) -> float:
        """Return the bytes that one micro-batch of `trainer.micro_batch_tokens` keeps in one model chunk."""
        sizes = self._sizes()
        layers = list(self.layout.chunk_layers(self.info.num_layers, stage, chunk))
        passed = self.transformer
        per_token = [self.saved_per_token(layer, load) for layer in layers]
        if passed.get("recompute_granularity") == "full":
            count = int(passed.get("recompute_num_layers") or 1)
            boundary = float(sizes.hidden * sizes.element)
            boundary /= self.layout.tensor if self.layout.sequence or passed.get("distribute_saved_activations") else 1
            if passed.get("recompute_method") == "block":
                kept = boundary * min(count, len(layers)) + sum(per_token[count:])
            else:
                kept = boundary * -(-len(layers) // count)
        else:
            kept = sum(per_token)
        predicts = stage == self.layout.pipeline - 1 and chunk == (self.layout.virtual_pipeline or 1) - 1
        if predicts:
            kept += output_bytes(sizes)
        if stage == 0 and chunk == 0:
            kept += 8
        return kept * self.tokens

    def recompute_bytes(self, stage: int) -> float:
        """Return the bytes that backward recomputes at a time, in addition to those that forward kept.

        The output layer's tensors are already released then. With the method `block`, which recomputes the first layers
        of a stage, so are those of the other layers.
        """
        passed = self.transformer
        granularity = passed.get("recompute_granularity")
        if granularity is None:
            return 0.0
        plain = self._without_recompute()
        count = self.info.num_layers
        chunks = [self.layout.chunk_layers(count, stage, each) for each in range(self.layout.virtual_pipeline or 1)]
        layers = [layer for chunk in chunks for layer in chunk]
        whole = max((plain.saved_per_token(layer) for layer in layers), default=0.0)
        released = output_bytes(self._sizes()) if stage == self.layout.pipeline - 1 else 0.0
        if granularity == "full":
            count = int(passed.get("recompute_num_layers") or 1)
            per_chunk = max(map(len, chunks))
            if passed.get("recompute_method") == "block":
                released += whole * max(0, per_chunk - count)
                count = 1
            working = whole * min(count, per_chunk)
        else:
            working = whole - min((self.saved_per_token(layer) for layer in layers), default=0.0)
        return max(0.0, working - released) * self.tokens

    def peak_bytes(self, stage: int, load: float = 1.0) -> float:
        """Return the peak bytes of activations of a rank of `stage`, with a full pipeline."""
        chunks = self.layout.virtual_pipeline or 1
        sizes = [self.chunk_bytes(stage, chunk, load) for chunk in range(chunks)]
        return sum(sizes) / chunks * in_flight_chunks(self.layout, stage)

    @property
    def patch_limit(self) -> int:
        """The most vision patches of a micro-batch; 0 for a text model."""
        tower = self.info.vision
        if tower is None:
            return 0
        return min(self.trainer.micro_batch_patches or sys.maxsize, self.trainer.token_limit * tower.merge**2)

    def pixel_bytes(self) -> int:
        """Return the bytes of a micro-batch's pixels on the device: uint8, fp32, and normalised."""
        tower = self.info.vision
        return self.patch_limit * tower.patch_size * (1 + FP32 + self.element) if tower else 0

    def tower_bytes(self, *, update: bool) -> int:
        """Return the bytes of the vision tower's tensors for one micro-batch: a block's, and those kept for backward.

        A frozen tower keeps only its projector's input, a trained one the input of each block.
        """
        tower, element = self.info.vision, self.element
        if tower is None:
            return 0
        block = tower.hidden * (2 * FP32 + 9 * element) + 3 * tower.ffn * element
        if not update or self.trains_vision == "none":
            return self.patch_limit * block
        kept = tower.hidden * (FP32 + 5 * element)  # of the projector
        if self.trains_vision == "all":
            kept += tower.layers * tower.hidden * element
            block += tower.hidden * (2 * FP32 + 4 * element) + tower.ffn * element
        return self.patch_limit * (kept * in_flight_chunks(self.layout, 0) + block)

    def feature_cache_bytes(self) -> int:
        """Return the most bytes that the frozen towers of this rank cache of a step's images."""
        tower = self.info.vision
        if tower is None:
            return 0
        width = max(tower.hidden, self.info.hidden // tower.merge**2)  # per patch, before or after the projector
        one = min(FEATURE_CACHE_BYTES, self.step_patches * width * (1 + len(tower.deepstack)) * self.element)
        return one * (len(self.frozen) + (self.trains_vision != "all"))

    def logits_bytes(self, *, update: bool) -> int:
        """Return the bytes of one chunk of the log-prob head: of a forward pass, or of an `update` with backward pass.

        For separate operations on a whole chunk (trainer/logprobs.py). The compiled head needs less, and so does a CPU,
        which processes a part of the chunk at a time.
        """
        columns = padded_vocabulary(self.info, self.layout.tensor) // self.layout.tensor
        rows = min(LOGPROB_CHUNK_ROWS, self.tokens)
        copy = self.element if self.element != FP32 else 0  # the compute-precision copy of an fp32 tensor
        # fp32 logits, which the entropy's products overwrite; the entropy also needs their exponentials.
        forward = rows * columns * (copy + FP32)
        if not update:
            return forward
        forward += rows * columns * FP32
        # The logits; their fp32 copy, which becomes the gradient; the gradient's copy, or the entropy's factor.
        weight = columns * self.info.hidden
        gradient = rows * columns * (copy + FP32 + max(copy, FP32 if self.weighs_entropy else 0)) + weight * FP32
        # The weight's gradient is summed over chunks in fp32; each chunk's product, and the result, are in bf16.
        backward = max(gradient, rows * columns * copy + weight * (FP32 + copy))
        return max(forward, backward)


def in_flight_chunks(layout: Layout, stage: int) -> int:
    """Return the largest number of chunk passes whose activations a rank of `stage` holds (1F1B or interleaved)."""
    if layout.virtual_pipeline is None:
        return layout.pipeline - stage
    warmup = (layout.pipeline - stage - 1) * 2 + (layout.virtual_pipeline - 1) * layout.pipeline
    return warmup + 1
