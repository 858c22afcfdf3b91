"""The plan of a run, computed from its config: ranks, layout, devices, samples per step, memory per GPU.

`make_plan` checks everything and starts nothing. It imports neither vLLM nor Ray, and torch only if `megatron` passes
fields.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megarl.common.errors import ConfigError
from megarl.common.values import GIB, gib
from megarl.config.checks.sections import DeviceType, check, detect_device, max_sequence_tokens
from megarl.config.derived.datasets import longest_response
from megarl.config.derived.hardware import local_gpus
from megarl.config.derived.pools import Pools, most_replicas, resolve_pools, trainer_layout
from megarl.config.derived.staleness import pace_notes
from megarl.config.derived.teachers import engine_config, engine_teachers, scored_tokens
from megarl.config.memory_plan.memory import (
    Device,
    EngineMemory,
    Memory,
    engine_memory,
    most_tokens,
    resolve_auto,
    trainer_memory,
)
from megarl.config.memory_plan.parameters import TrainerRank, model_parameters
from megarl.config.memory_plan.shared_gpus import SharedMemory, kept_asleep, shared_memory, side_by_side
from megarl.config.schema import Config, RolloutConfig
from megarl.config.schema.algorithm import TeacherConfig
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.layout import Layout

# The most effective way to reduce each term, for the error message of a plan that does not fit.
_REMEDIES = {
    "weights": "raise trainer.parallel.tensor or pipeline (expert for a mixture of experts)",
    "gradients": "raise trainer.parallel.tensor or pipeline (expert for a mixture of experts)",
    "optimizer": "use trainer.optimizer.distributed with more data-parallel ranks, or more tensor/pipeline ranks",
    "activations": "lower trainer.micro_batch_tokens or set trainer.recompute=auto",
    "recompute": "lower trainer.micro_batch_tokens or megatron.transformer.recompute_num_layers",
    "uneven experts": "lower trainer.micro_batch_tokens or set trainer.recompute=auto",
    "vision tower": "set trainer.micro_batch_patches, or model.vision.train=projector",
    "pixels": "set trainer.micro_batch_patches",
    "logits chunk": "raise trainer.parallel.tensor, which shares the vocabulary",
    "forward of one layer": "lower trainer.micro_batch_tokens",
    "reference weights": "set reference.placement=cpu_offload",
    "sync buckets": "lower weight_sync.bucket_mb",
    "KV cache": "lower rollout.max_model_len or data.max_prompt_tokens, or raise rollout.tensor_parallel or "
    "rollout.gpu_memory_utilization",
}


@dataclass(frozen=True)
class TeacherPlan:
    """A teacher with engines; `memory` is None if its config.json is not on this machine.

    `gpu_share`: an engine's share of a GPU that it shares with an engine of the policy; `both`: memory of the two.
    """

    name: str
    replicas: int
    engine_gpus: int
    memory: Memory | None
    gpu_share: float | None = None
    both: Memory | None = None


@dataclass(frozen=True)
class RunPlan:
    """A checked and resolved config; memory is per GPU (on CPU: per process).

    `config`: with a value for each `auto` under `trainer`. `most_tokens`: the most tokens of a micro-batch that leave a
    tenth of the memory free, None if that is unknown or none do.
    """

    config: Config
    device: DeviceType
    info: ModelInfo
    layout: Layout
    pools: Pools
    replicas: int
    most_replicas: int
    engine_gpus: int
    parameters: int
    active_parameters: int
    groups_per_step: int
    samples_per_step: int
    samples_per_update: int
    max_sequence_tokens: int
    max_response_tokens: int
    most_tokens: int | None
    trainer: Memory
    engine: EngineMemory
    teachers: tuple[TeacherPlan, ...]
    shared: SharedMemory | None  # with `rollout.share_gpus`
    notes: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """The number of trainer ranks, torchrun's world size."""
        return self.layout.world_size


def make_plan(config: Config, *, device: DeviceType | None = None, files: bool = True) -> RunPlan:
    """Check `config` and resolve it. Raises ConfigError listing every problem, including memory.

    `device` and `files`: as in `checks.check`.
    """
    device = device or detect_device()
    info = check(config, device=device, files=files)
    layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
    cuda = device == "cuda"
    longest = max_sequence_tokens(config, info)
    total, active = model_parameters(info)
    engine = engine_memory(config, info, longest, cuda=cuda, limit=_limit(config.rollout.device_memory_gib, cuda))
    taken = kept_asleep(engine.memory) if config.rollout.share_gpus else 0
    gpu = Device(cuda, fused_layers(cuda), _limit(config.trainer.device_memory_gib, cuda), taken)
    rank = resolve_auto(TrainerRank.of(config, info, layout, fused=gpu.fused), gpu, longest)
    config = config.model_copy(update={"trainer": rank.trainer})
    trainer = trainer_memory(rank, gpu)
    teachers = _teacher_plans(config, engine.memory, longest, cuda)
    shared = None
    if config.rollout.share_gpus:
        shared = shared_memory(trainer, engine.memory, [each.name for each in rank.frozen])
    problems = [
        *_memory_problems(config.rollout, trainer, engine, longest),
        *(shared.problems() if shared is not None else ()),
        *_teacher_problems(config.teachers, teachers),
    ]
    if problems:
        raise ConfigError(problems)
    batch = config.batch
    samples = batch.groups * batch.samples_per_group
    return RunPlan(
        config=config,
        device=device,
        info=info,
        layout=layout,
        pools=resolve_pools(config),
        replicas=config.rollout.replicas,
        most_replicas=most_replicas(config.rollout),
        engine_gpus=config.rollout.tensor_parallel,
        parameters=total,
        active_parameters=active,
        groups_per_step=batch.groups,
        samples_per_step=samples,
        samples_per_update=-(-batch.groups // config.trainer.mini_batches) * batch.samples_per_group,
        max_sequence_tokens=longest,
        max_response_tokens=longest_response(config.data, config.sampling, config.evaluation).tokens,
        most_tokens=most_tokens(rank, gpu),
        trainer=trainer,
        engine=engine,
        teachers=teachers,
        shared=shared,
        notes=tuple(_notes(config, layout, trainer, engine, cuda)),
    )


def _teacher_plans(config: Config, policy: Memory, longest: int, cuda: bool) -> tuple[TeacherPlan, ...]:
    """Return the plans of the teachers with engines, without terms of a sync: they never receive weights.

    `policy`: the memory of an engine of the policy.
    """
    found = []
    for each in engine_teachers(config.teachers):
        memory = None
        with suppress(ValueError):
            limit = _limit(config.rollout.device_memory_gib, cuda)
            own, info = engine_config(config, each), load_info(each.path)
            whole = engine_memory(own, info, scored_tokens(longest), cuda=cuda, limit=limit).memory
            memory = Memory(tuple(term for term in whole.terms if term.when != "sync"), whole.limit)
        both = side_by_side(policy, memory) if memory is not None and each.gpu_share is not None and cuda else None
        found.append(TeacherPlan(each.name, each.replicas, each.tensor_parallel, memory, each.gpu_share, both))
    return tuple(found)


def _teacher_problems(sections: Sequence[TeacherConfig], teachers: Sequence[TeacherPlan]) -> Iterator[str]:
    """Yield the teachers whose engines do not fit into their GPUs."""
    known = {each.name: (f"teachers.{index}", each) for index, each in enumerate(sections)}
    for each in teachers:
        if each.memory is None or each.memory.limit is None:
            continue
        key, own = known[each.name]
        needed = sum(term.bytes for term in each.memory.terms if term.name != "KV cache")
        allowed = int(each.memory.limit * own.gpu_memory_utilization)
        if needed > allowed:
            yield (
                f"{key}: {gib(needed)} per GPU before any KV cache, of {gib(allowed)} allowed "
                f"({key}.gpu_memory_utilization): raise {key}.tensor_parallel"
            )
        if each.both is not None and each.both.peak > each.memory.limit:
            yield (
                f"{key}.gpu_share: {gib(each.both.peak)} per GPU in phase {each.both.peak_phase!r}, of "
                f"{gib(each.memory.limit)}, with the policy's engine: lower {key}.gpu_memory_utilization, "
                "rollout.gpu_memory_utilization or weight_sync.bucket_mb"
            )


def fused_layers(cuda: bool) -> bool:
    """Return whether the plan is for Transformer Engine's layers.

    On a machine with GPUs that depends on the installation; on one without GPUs it is assumed.
    """
    return cuda and (not local_gpus() or importlib.util.find_spec("transformer_engine") is not None)


def _limit(gib: float | None, cuda: bool) -> int | None:
    """Return a GPU's memory in bytes: as configured, else this machine's first GPU's, else None."""
    if gib is not None:
        return int(gib * GIB)
    gpus = local_gpus() if cuda else ()
    return gpus[0].memory if gpus else None


def _memory_problems(rollout: RolloutConfig, trainer: Memory, engine: EngineMemory, longest: int) -> list[str]:
    """Return a problem for each pool that does not fit into its GPUs."""
    problems = []
    if trainer.limit is not None and trainer.peak > trainer.limit:
        problems.append(_too_big("trainer", trainer))
    memory = engine.memory
    if memory.limit is not None:
        fixed = [term for term in memory.terms if term.name != "KV cache" and term.when != "sync"]
        needed = sum(term.bytes for term in fixed)
        allowed = int(memory.limit * rollout.gpu_memory_utilization)
        if needed > allowed:
            largest = max(fixed, key=lambda term: term.bytes)
            problems.append(
                f"rollout: {gib(needed)} per GPU before any KV cache, of {gib(allowed)} allowed (gpu_memory_"
                f"utilization); the largest term is {largest.name} with {gib(largest.bytes)}: raise "
                "rollout.tensor_parallel"
            )
            return problems
        if memory.peak > memory.limit:
            problems.append(
                f"rollout: {gib(memory.peak)} per GPU in phase {memory.peak_phase!r}, of {gib(memory.limit)}: the "
                f"sync needs memory outside vLLM's share: lower rollout.gpu_memory_utilization or "
                "weight_sync.bucket_mb"
            )
    if engine.kv_tokens is not None and engine.kv_tokens < longest:
        cache = memory.term("KV cache").bytes
        problems.append(
            f"rollout: the KV cache of {gib(cache)} holds {engine.kv_tokens} tokens, less than one sequence of "
            f"{longest}: {_REMEDIES['KV cache']}"
        )
    return problems


def _too_big(pool: str, memory: Memory) -> str:
    largest = memory.largest()
    assert memory.limit is not None
    return (
        f"{pool}: {gib(memory.peak)} per GPU in phase {memory.peak_phase!r}, of {gib(memory.limit)} "
        f"({pool}.device_memory_gib); the largest term is {largest.name} with {gib(largest.bytes)}: "
        f"{_REMEDIES.get(largest.name, 'use more GPUs')}"
    )


def _notes(config: Config, layout: Layout, trainer: Memory, engine: EngineMemory, cuda: bool) -> list[str]:
    """Return notes on a plan that can run but may be slow or is only partly checked."""
    notes = list(pace_notes(config))
    pools = resolve_pools(config)
    if layout.tensor > pools.trainer.gpus_per_node:
        notes.append(
            f"trainer.parallel.tensor={layout.tensor} spans nodes of {pools.trainer.gpus_per_node} GPUs: every "
            "layer then waits for the network"
        )
    if config.trainer.precision == "fp32" and fused_layers(cuda):
        notes.append(
            "trainer.precision=fp32: Transformer Engine multiplies fp32 as TF32, with errors near 1e-3, unless "
            "NVIDIA_TF32_OVERRIDE=0 is in the environment"
        )
    if cuda and trainer.limit is None:
        notes.append("GPU memory is unknown here: set trainer.device_memory_gib to check the plan against it")
    if config.data.max_prompt_tokens is None and config.rollout.max_model_len is None:
        notes.append(
            "data.max_prompt_tokens is not set: the plan is for sequences as long as the model's whole context; set it "
            "to what the longest prompt needs"
        )
    if engine.kv_tokens is not None and engine.memory.limit is not None:
        wanted = config.batch.groups * config.batch.samples_per_group / config.rollout.replicas
        room = engine.kv_tokens / max(1, longest_response(config.data, config.sampling, config.evaluation).tokens)
        if room < min(wanted, config.rollout.max_num_seqs):
            notes.append(
                f"the KV cache holds about {room:.0f} full-length sequences per engine, for {wanted:.0f} samples "
                "per engine and step: vLLM will preempt or queue"
            )
    return notes
