"""Estimates the memory per GPU of both pools by named terms, and resolves `auto` from it. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.common.values import FP32, GIB, MIB
from megarl.config.megatron.reserved import passes_recompute
from megarl.config.memory_plan.parameters import (
    FrozenModel,
    TrainerRank,
    bytes_per_element,
    chunk_parameters,
    model_parameters,
    padded_vocabulary,
)
from megarl.config.schema import CPU_KV_CACHE_GIB, Config, Recompute, WeightSyncConfig
from megarl.models.architecture.architecture import DeltaNet, ModelInfo

# Estimates, to be replaced by measurements: CUDA context, cuBLAS workspaces, fragmentation, and the buffers of each
# NCCL communicator, of which a trainer rank has up to ten; an engine has fewer, and CUDA graphs instead.
TRAINER_OVERHEAD = 5 * GIB
ENGINE_OVERHEAD = 4 * GIB
# Expert rows of the most loaded rank relative to the mean, over all layers of a micro-batch. An estimate.
EXPERT_LOAD = 1.25
ENGINE_BATCHED_TOKENS = 8192  # vLLM's default max_num_batched_tokens on large GPUs

SYNC_BUCKETS = 5  # the size of a trainer rank's buffers for them, in buckets
ENGINE_SYNC_BUCKETS = 3  # that of an engine worker
FREE = 0.1  # share of the device memory that the plan must leave
TOKENS_STEP = 1024
# Larger micro-batches gain nothing measurable: smaller ones fill a GPU.
MOST_TOKENS = 65536
UNKNOWN_MEMORY_TOKENS = 8192


@dataclass(frozen=True)
class Term:
    """Bytes with a name; `when` is `always` or a phase of the step. Phases do not overlap."""

    name: str
    bytes: int
    when: str = "always"
    note: str = ""


@dataclass(frozen=True)
class Memory:
    """All terms of one GPU (on CPU: of one process); `limit` is the device's memory in bytes, None if unknown."""

    terms: tuple[Term, ...]
    limit: int | None

    def total(self, phase: str) -> int:
        """Return the bytes of one phase, including permanent terms."""
        return sum(term.bytes for term in self.terms if term.when in ("always", phase))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases with their own terms; `always` if there are none."""
        return tuple(dict.fromkeys(term.when for term in self.terms if term.when != "always")) or ("always",)

    @property
    def peak_phase(self) -> str:
        """The phase with the largest total."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """The largest total of all phases, in bytes."""
        return self.total(self.peak_phase)

    def term(self, name: str) -> Term:
        """Return the first term with this name."""
        return next(term for term in self.terms if term.name == name)

    def largest(self) -> Term:
        """Return the largest term of the peak phase."""
        return max(
            (term for term in self.terms if term.when in ("always", self.peak_phase)), key=lambda term: term.bytes
        )


@dataclass(frozen=True)
class Device:
    """The trainer's device as the plan sees it.

    `limit`: its memory in bytes, None if unknown; `taken`: bytes of it that engines keep while the trainer trains.
    """

    cuda: bool
    fused: bool
    limit: int | None
    taken: int = 0


def trainer_memory(rank: TrainerRank, device: Device) -> Memory:
    """Return the memory of the trainer rank that needs most, of all pipeline stages."""
    stages = (_stage_memory(rank, device, stage) for stage in range(rank.layout.pipeline))
    return max(stages, key=lambda memory: memory.peak)


def _stage_memory(rank: TrainerRank, device: Device, stage: int) -> Memory:
    state, layout = rank.state_bytes(stage), rank.layout
    activations = int(rank.peak_bytes(stage))
    terms = [
        Term("weights", state.weights, note=f"stage {stage}" if layout.pipeline > 1 else ""),
        Term("gradients", state.gradients),
        Term("optimizer", state.optimizer),
        Term("activations", activations, "update"),
    ]
    if layout.expert > 1:
        more = rank.peak_bytes(stage, load=EXPERT_LOAD) - activations
        terms.append(Term("uneven experts", int(more), "update", note="estimate"))
    if again := rank.recompute_bytes(stage):
        terms.append(Term("recompute", int(again), "update"))
    if stage == layout.pipeline - 1:
        terms.append(Term("logits chunk", rank.logits_bytes(update=True), "update"))
        terms.append(Term("logits chunk", rank.logits_bytes(update=False), "log-probs"))
    if stage == 0 and rank.info.vision:
        for phase in ("update", "log-probs"):
            terms.append(Term("vision tower", rank.tower_bytes(update=phase == "update"), phase, note="estimate"))
            terms.append(Term("pixels", rank.pixel_bytes(), phase))
            terms.append(Term("image feature cache", rank.feature_cache_bytes(), phase, note="at most"))
    frozen = [(each, replace(rank, info=each.info)) for each in rank.frozen]
    widest = max(forward_bytes(each) for each in (rank, *(held for _, held in frozen)))
    terms.append(Term("forward of one layer", int(widest), "log-probs"))
    terms += _frozen_models(frozen, stage, device.cuda)
    terms.append(Term("sync buckets", _built_buckets(rank.sync, rank)))
    terms.append(Term("largest tensor", _largest_tensor(rank), "sync"))
    if device.cuda:
        terms.append(Term("CUDA and NCCL", TRAINER_OVERHEAD, note="estimate"))
    return Memory(tuple(terms), device.limit)


def _frozen_models(found: Sequence[tuple[FrozenModel, TrainerRank]], stage: int, cuda: bool) -> Iterator[Term]:
    """Yield the weights of the reference policy and of the teachers on the trainer's ranks.

    `found`: each with the rank of its model. Models in host memory are on the device one at a time: the largest counts.
    """
    sized = [(each.placement, each.name, _raw_weights(rank, stage)) for each, rank in found]
    kept = [(name, size) for where, name, size in sized if not cuda or where == "gpu"]
    yield from (Term(name, size) for name, size in kept)
    moved = [(size, name) for where, name, size in sized if (name, size) not in kept]
    if moved:
        size, name = max(moved)
        yield Term(name, size, "log-probs")


def _raw_weights(rank: TrainerRank, stage: int) -> int:
    """Return the bytes of the weights of one rank of `stage`, without buffer padding."""
    chunks = range(rank.layout.virtual_pipeline or 1)
    return sum(sum(chunk_parameters(rank.info, rank.layout, stage, each)) for each in chunks) * rank.element


def _built_buckets(sync: WeightSyncConfig, rank: TrainerRank) -> int:
    """Return the bytes of a trainer rank's buffers for buckets, which are kept between syncs.

    Two are for its own buckets, one for others' buckets, one for the messages of gathers, and one for the whole rows of
    a piece that ends inside a row. None is larger than the model.
    """
    whole = model_parameters(rank.info)[0] * rank.element
    bucket = min(int(sync.bucket_mb * MIB), whole)
    return SYNC_BUCKETS * bucket


def _largest_tensor(rank: TrainerRank) -> int:
    """Return the bytes of the largest Hugging Face tensor, which an export gathers whole."""
    info = rank.info
    return max(info.vocab_size, info.ffn, info.heads * info.head_dim) * info.hidden * rank.element


def forward_bytes(rank: TrainerRank) -> float:
    """Return the peak bytes of a micro-batch in the widest layer without gradients."""
    return max(map(rank.forward_per_token, range(rank.info.num_layers))) * rank.tokens


@dataclass(frozen=True)
class EngineMemory:
    """One rollout GPU (on CPU: one engine worker); `kv_tokens` is the capacity of the whole engine's KV cache."""

    memory: Memory
    kv_tokens: int | None
    kv_bytes_per_token: int


def engine_memory(
    config: Config, info: ModelInfo, max_model_len: int, *, cuda: bool, limit: int | None
) -> EngineMemory:
    """Return weights, working memory and KV cache of one engine GPU.

    vLLM uses `gpu_memory_utilization` of the device; the KV cache gets the part that weights and vLLM's profiling run
    do not need. Without a GPU the cache has CPU_KV_CACHE_GIB.
    """
    rollout = config.rollout
    element = bytes_per_element(config.trainer.precision)
    ranks = rollout.tensor_parallel
    per_token = info.attention_layers * _cached_channels(info, ranks) * element
    weights = model_parameters(info)[0] * element  # that a sync sends
    terms = [Term("weights", model_parameters(info)[0] * element // ranks)]
    batched = int(rollout.engine_kwargs.get("max_num_batched_tokens") or ENGINE_BATCHED_TOKENS)
    columns = padded_vocabulary(info, 64 * ranks) // ranks
    working = min(batched, max(max_model_len, rollout.max_num_seqs)) * _engine_working_set(info, ranks) * element
    terms.append(Term("forward", int(working), "generate", note="estimate"))
    terms.append(Term("logits", rollout.max_num_seqs * columns * ranks * FP32 * 2, "generate"))
    states = rollout.max_num_seqs * _request_bytes(info.delta, element) // ranks if info.delta else 0
    if states:
        terms.append(Term("DeltaNet states", states, note=f"of {rollout.max_num_seqs} requests"))
    # vLLM does not know these two: they are in addition to its share of the memory.
    bucket = min(int(config.weight_sync.bucket_mb * MIB), weights)
    terms.append(Term("sync buckets", ENGINE_SYNC_BUCKETS * bucket, "sync"))
    terms.append(Term("reload", _reloaded(info, ranks) * element, "sync"))
    if not cuda:
        cache = CPU_KV_CACHE_GIB * GIB - states  # vLLM keeps the states in its cache
        terms.append(Term("KV cache", cache))
        return EngineMemory(Memory(tuple(terms), limit), cache // per_token, per_token)
    terms.append(Term("CUDA, NCCL and graphs", ENGINE_OVERHEAD, note="estimate"))
    if limit is None:
        return EngineMemory(Memory(tuple(terms), None), None, per_token)
    used = sum(term.bytes for term in terms if term.when != "sync")
    cache = max(0, int(limit * rollout.gpu_memory_utilization) - used)
    terms.append(Term("KV cache", cache, note=f"the rest of {rollout.gpu_memory_utilization:.0%}"))
    return EngineMemory(Memory(tuple(terms), limit), cache // per_token, per_token)


def _request_bytes(delta: DeltaNet, element: int) -> int:
    """Return the bytes that an engine keeps per request in all Gated DeltaNet layers, whatever its length."""
    convolution = (delta.conv - 1) * (2 * delta.keys + delta.values) * element
    return sum(delta.layers) * (delta.state * FP32 + convolution)


def _cached_channels(info: ModelInfo, ranks: int) -> int:
    """Return the elements that one layer caches per token on one rank; every rank caches the whole MLA latent."""
    if info.mla:
        return info.mla.kv_rank + info.mla.rotated
    return 2 * max(1, info.kv_heads // ranks) * info.head_dim


def _engine_working_set(info: ModelInfo, ranks: int) -> float:
    """Return the most elements per batched token at a time in one layer's forward pass."""
    width = info.moe_ffn * info.topk if info.num_experts else info.ffn
    return 4 * info.hidden + 3 * max(info.heads * info.head_dim, width) / ranks


def _reloaded(info: ModelInfo, ranks: int) -> int:
    """Return the elements that vLLM's layer-wise reload holds in addition to the model, for its largest module.

    It keeps a module's whole tensors until the last one arrives, and then makes the module's shard from them (vLLM
    0.32, model_executor/model_loader/reload). A layer's experts, three matrices each, are one module; gate and up
    projection of a dense layer are another.
    """
    dense = 2 * info.ffn * info.hidden
    experts = (info.num_experts or 0) * 3 * info.moe_ffn * info.hidden
    whole = max(dense, experts, info.vocab_size * info.hidden)
    return whole + whole // ranks


def resolve_auto(rank: TrainerRank, device: Device, longest: int) -> TrainerRank:
    """Return `rank` with a value for each `auto` under `trainer`. `longest`: tokens of the longest sample.

    Recomputation is the cheapest that leaves a tenth of the memory free: none, selective, the first n layers of each
    stage (the smallest n), or all layers. With it, a micro-batch gets the most tokens that leave as much free, and at
    least the longest sample. CPUs recompute nothing; GPUs with unknown memory recompute every layer.
    """
    wants_tokens = rank.trainer.micro_batch_tokens == "auto"
    if wants_tokens:
        rank = rank.with_trainer(micro_batch_tokens=longest)
    if rank.trainer.recompute == "auto" and not passes_recompute(rank.megatron):
        planned, layers = rank, rank.layout.most_layers(rank.info.num_layers)
        recompute = _cheapest(layers, device, lambda kind: _fits(planned.with_trainer(recompute=kind), device))
        rank = rank.with_trainer(recompute=recompute)
    if wants_tokens:
        least = longest if device.limit is not None else max(longest, UNKNOWN_MEMORY_TOKENS)
        rank = rank.with_trainer(micro_batch_tokens=most_tokens(rank, device) or least)
    return rank


def most_tokens(rank: TrainerRank, device: Device) -> int | None:
    """Return the most tokens of a micro-batch that leave a tenth of the memory free, in steps of TOKENS_STEP.

    At least `trainer.micro_batch_tokens`; None if even that does not fit or the memory is unknown.
    """
    least = rank.trainer.token_limit

    def fits(tokens: int) -> bool:
        return _fits(rank.with_trainer(micro_batch_tokens=tokens), device)

    if device.limit is None or not fits(least):
        return None
    most = MOST_TOKENS * rank.layout.context
    steps = range(-(-least // TOKENS_STEP) * TOKENS_STEP, most + 1, TOKENS_STEP)
    passed = _first(len(steps), lambda index: not fits(steps[index]))
    return steps[passed - 1] if passed else least


def _cheapest(layers: int, device: Device, fits: Callable[[Recompute], bool]) -> Recompute:
    """Return the cheapest recomputation that fits; `layers`: per stage or chunk."""
    if device.limit is None:
        return "full" if device.cuda else "none"
    if fits("none"):
        return "none"
    if fits("selective"):
        return "selective"
    # The more layers are recomputed, the less is kept.
    count = 1 + _first(layers - 1, lambda index: fits(index + 1))
    return count if count < layers else "full"


def _fits(rank: TrainerRank, device: Device) -> bool:
    memory = trainer_memory(rank, device)
    return memory.limit is not None and memory.peak + device.taken <= (1 - FREE) * memory.limit


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """Return the first index below `count` for which `holds` is true, else `count`. `holds` changes once, to true."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
