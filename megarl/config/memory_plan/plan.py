"""The plan of a run, computed from its config: ranks, layout, devices, samples per step, memory per GPU; as tables too.

`make_plan` checks everything and starts nothing. It imports neither vLLM nor Ray, and torch only if `megatron` passes
fields.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from megarl.common.errors import FIRST_PROMPT, ConfigError, Findings
from megarl.common.values import GIB, MIB
from megarl.config.checks.sections import DeviceType, check, detect_device, max_sequence_tokens
from megarl.config.derived.datasets import longest_response
from megarl.config.derived.hardware import local_gpus
from megarl.config.derived.pools import Pool, Pools, most_replicas, resolve_pools, trainer_layout
from megarl.config.derived.staleness import group_deadline_s, pace_notes, pace_of
from megarl.config.derived.teachers import engine_config, engine_teachers, scored_tokens
from megarl.config.loading.marked_yaml import WIDTH, marked_yaml
from megarl.config.megatron.reserved import passes_recompute
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
from megarl.config.schema import Config, MegatronConfig, RolloutConfig, TrainerConfig
from megarl.config.schema.algorithm import TeacherConfig
from megarl.config.schema.job import CheckpointConfig
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
    "logits chunk": "lower trainer.logprob_chunk_tokens",
    "forward of one layer": "lower trainer.micro_batch_tokens",
    "reference weights": "set reference.placement=cpu_offload",
    "sync buckets": "lower weight_sync.bucket_mb",
    "KV cache": "raise rollout.tensor_parallel or rollout.gpu_memory_utilization, or lower max_model_len",
}


@dataclass(frozen=True)
class TeacherPlan:
    """A teacher with engines of its own; `memory` is None if its config.json is not on this machine.

    `gpu_share`: of a GPU that an engine shares with one of the policy's, on which both need the memory `both`.
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
    """Check `config` and resolve it; raises ConfigError that lists every problem, memory included.

    `device` and `files` are those of `checks.check`.
    """
    device = device or detect_device()
    info = check(config, device=device, files=files)
    layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
    cuda = device == "cuda"
    longest = max_sequence_tokens(config, info)
    total, active = model_parameters(info)
    engine = engine_memory(config, info, longest, cuda=cuda, limit=_limit(config.rollout.device_memory_gib, cuda))
    taken = kept_asleep(engine.memory) if config.rollout.share_gpus else 0
    gpu = Device(cuda, _fused(cuda), _limit(config.trainer.device_memory_gib, cuda), taken)
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
    """Return the plans of the teachers with engines. The terms of a sync are left out: they are never given weights.

    `policy`: the memory of one of its engines.
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


def _fused(cuda: bool) -> bool:
    """Return whether the plan is for Transformer Engine's layers.

    On a machine with GPUs that depends on its installation; for a plan on a machine without GPUs it is assumed.
    """
    return cuda and (not local_gpus() or importlib.util.find_spec("transformer_engine") is not None)


def _limit(gib: float | None, cuda: bool) -> int | None:
    """Return a GPU's memory in bytes: the configured one, else that of this machine's first GPU, else None."""
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
                f"rollout: {gib(memory.peak)} per GPU in phase {memory.peak_phase!r}, of {gib(memory.limit)}: the sync "
                "needs memory besides the share that vLLM uses: lower rollout.gpu_memory_utilization or "
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
    """Return hints about a plan that can run but may be slow or is only partly checked."""
    notes = list(pace_notes(config))
    pools = resolve_pools(config)
    if layout.tensor > pools.trainer.gpus_per_node:
        notes.append(
            f"trainer.parallel.tensor={layout.tensor} spans nodes of {pools.trainer.gpus_per_node} GPUs: every "
            "layer then waits for the network"
        )
    if config.trainer.precision == "fp32" and _fused(cuda):
        notes.append(
            "trainer.precision=fp32: Transformer Engine multiplies fp32 as TF32, with errors near 1e-3, unless "
            "NVIDIA_TF32_OVERRIDE=0 is in the environment"
        )
    if cuda and trainer.limit is None:
        notes.append("GPU memory is unknown here: set trainer.device_memory_gib to have the plan checked against it")
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


def gib(size: float) -> str:
    """Return bytes as text in GiB, or in MiB below 0.1 GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def print_dry_run(plan: RunPlan, given: Config, stream: TextIO, found: Findings, *, whole: bool = False) -> None:
    """Write what the run will see, the plan and the config (YAML) to `stream`, with colours only on a terminal.

    `given`: the config as it was loaded: what the user has set. Defaults are shown too if `whole`. The warnings and
    notes of `found`, and those of the plan, come last.
    """
    console = Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    texts = {name: value for name, value in found.seen if name.startswith(FIRST_PROMPT)}
    if found.seen:
        console.print(Text("# data and reward", style="bold"))
        console.print(_pairs(each for each in found.seen if each[0] not in texts))
    for name, value in texts.items():
        console.print(Text(f"\n# {name}, as the model sees it", style="bold"), Text(value), sep="\n")
    console.print(Text("\n# plan", style="bold"), _pairs(_summary(plan)), sep="\n")
    memory = {f"teacher {each.name}": each.memory for each in plan.teachers}
    memory |= {f"rollout and teacher {each.name}": each.both for each in plan.teachers if each.both is not None}
    if plan.shared is not None:
        memory["both in turns"] = plan.shared.memory
    for pool, needed in {"trainer": plan.trainer, "rollout": plan.engine.memory, **memory}.items():
        if needed is not None:
            console.print(_memory(f"{pool}, per {_unit(plan)}", needed))
    hint = "" if whole else "; --all adds the defaults"
    console.print(Text(f"\n# resolved config: lines are set by the file or the command line{hint}", style="bold"))
    text = marked_yaml(given, plan.config, whole=whole)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        stream.write(text)
    for note in (*plan.notes, *found.warnings, *found.notes):
        console.print(Text(f"note: {note}", style="yellow"))


def _unit(plan: RunPlan) -> str:
    return "GPU" if plan.device == "cuda" else "process"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _summary(plan: RunPlan) -> Iterable[tuple[str, str]]:
    """Yield (name, value) of each line of the summary."""
    layout, info = plan.layout, plan.info
    stages = layout.stage_layers(info.num_layers)
    uneven = f" ({' + '.join(map(str, stages))} layers)" if len(set(stages)) > 1 else ""
    parts = [f"TP {layout.tensor}", f"PP {layout.pipeline}{uneven}", f"DP {layout.data}"]
    parts += [f"VPP {layout.virtual_pipeline}"] if layout.virtual_pipeline else []
    parts += ["SP"] if layout.sequence else []
    if info.num_experts:
        parts += [f"EP {layout.expert}", f"ETP {layout.etp}", f"expert DP {layout.expert_data}"]
    moe = f", {plan.active_parameters / 1e9:.3g} B active" if info.num_experts else ""
    size = plan.parameters
    count = f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
    yield "device path", "CUDA" if plan.device == "cuda" else "CPU (gloo, emulated CUDA calls)"
    yield "model", f"{info.family}, {info.num_layers} layers, {count} parameters{moe}"
    yield "trainer", f"{_count(plan.ranks, 'rank')}: {' · '.join(parts)}"
    engines = _count(plan.replicas, "engine")
    more = f", places for {plan.most_replicas}" if plan.most_replicas > plan.replicas else ""
    width = f"{_count(plan.engine_gpus, _unit(plan))}{'' if plan.replicas == 1 else ' each'}"
    yield "rollout", f"{engines} of {width}{more}"
    for teacher in plan.teachers:
        width = f"{_count(teacher.engine_gpus, _unit(plan))}{'' if teacher.replicas == 1 else ' each'}"
        where = "" if teacher.gpu_share is None else f", on the policy's, of which it takes {teacher.gpu_share:g}"
        yield f"teacher {teacher.name}", f"{_count(teacher.replicas, 'engine')} of {width}{where}"
    if plan.device == "cuda":
        where = (
            "the trainer's, in turns"
            if plan.shared is not None
            else "same nodes"
            if plan.pools.shared
            else "nodes of its own"
        )
        yield "trainer devices", _devices(plan.pools.trainer)
        yield "rollout devices", f"{_devices(plan.pools.rollout)} ({where})"
        modules = "Transformer Engine's" if _fused(cuda=True) else "Megatron-Core's own: Transformer Engine is not here"
        yield "trainer modules", modules
        yield "host memory", _host_memory(plan)
    if plan.shared is not None:
        yield "shared GPUs", _shared(plan.shared, plan.pools.trainer.gpus_per_node)
    yield "weights load", _loading(plan)
    yield "step", f"{_count(plan.groups_per_step, 'group')}, {plan.samples_per_step} samples"
    yield "update", f"up to {plan.samples_per_update} samples"
    yield "micro-batch", _micro_batch(plan)
    yield "weights", str(pace_of(plan.config))
    yield "checkpoints", _checkpoints(plan.config.checkpoint)
    yield "recompute", _recompute(plan.config.trainer, plan.config.megatron)
    deadline_s, bound_s = group_deadline_s(plan.config), plan.config.timeouts.generate_s
    yield "group deadline", _deadline(deadline_s, bound_s, plan.config.rollout)
    yield "sequence", f"up to {plan.max_sequence_tokens} tokens, {plan.max_response_tokens} of them response"
    if plan.engine.kv_tokens is not None:
        room, each = plan.engine.kv_tokens, plan.engine.kv_bytes_per_token
        yield "KV cache", f"{room} tokens per engine, {each} bytes per token on each {_unit(plan)}"


def _checkpoints(settings: CheckpointConfig) -> str:
    if not settings.every:
        return "only when the run is asked to stop (checkpoint.every: 0)"
    auto = settings.every == "auto"
    often = "as often as takes at most 2% of the time" if auto else f"every {_count(int(settings.every), 'step')}"
    return f"{often}, and the last step; the newest {settings.keep_last} are kept"


def _host_memory(plan: RunPlan) -> str:
    """Return what a save, and a reference policy in host memory, take of a trainer node's memory besides processes."""
    of_rank = plan.trainer.term("optimizer").bytes + plan.trainer.term("weights").bytes // plan.layout.data
    of_rank += sum(
        term.bytes for term in plan.trainer.terms if term.name == "reference weights" and term.when != "always"
    )
    node = of_rank * plan.pools.trainer.gpus_per_node
    # torch's allocator of pinned memory rounds each block up to a power of two.
    return f"up to {gib(of_rank)} pinned per rank, {gib(node)} per trainer node, once more for rounding"


def _shared(shared: SharedMemory, ranks: int) -> str:
    return (
        f"{gib(shared.host)} of each rank's state in host memory while engines generate, {gib(shared.host * ranks)} "
        f"per node; about {shared.move_s:.1f} s each way (estimate); kept meanwhile: {gib(shared.parked)} by a parked "
        f"rank, {gib(shared.asleep)} by an engine asleep"
    )


def _loading(plan: RunPlan) -> str:
    """Return how engines are expected to take new weights; a run's log says at the first sync what each of them did."""
    if plan.device == "cpu":
        return "layer by layer: vLLM's CPU kernels compute with packed copies"
    if not plan.info.num_experts:
        return "in place"
    backend = plan.config.rollout.engine_kwargs.get("moe_backend", "auto")
    if backend == "auto":  # vLLM 0.32, fused_moe/oracle/unquantized.py
        return "in place with experts by Triton, vLLM's choice on Hopper; layer by layer where it takes FlashInfer"
    triton = backend in ("triton", "batched_triton")
    return (
        f"{'in place' if triton else 'layer by layer'}, with experts by {backend} (rollout.engine_kwargs.moe_backend)"
    )


def _micro_batch(plan: RunPlan) -> str:
    tokens, most = plan.config.trainer.token_limit, plan.most_tokens
    more = f"; {most} would fit with a tenth of the memory free" if most is not None and most > tokens else ""
    return f"up to {tokens} tokens{more}"


def _deadline(seconds: float | None, bound: float, rollout: RolloutConfig) -> str:
    if seconds is None:
        return (
            f"none; a response that takes {bound:g} s (timeouts.generate_s) fails its group, or ends the run if the "
            "trainer has waited for it from its start"
        )
    default = "" if rollout.group_deadline_s is not None else ", nine tenths of timeouts.generate_s"
    end = "are cut" if rollout.on_group_deadline == "cut" else "fail their group"
    return f"{seconds:g} s after its start{default}; responses that are unfinished then {end}"


def _recompute(trainer: TrainerConfig, megatron: MegatronConfig) -> str:
    if passes_recompute(megatron):
        return "as set in megatron.transformer"
    chosen = trainer.recompute
    return f"the first {_count(chosen, 'layer')} of each stage" if isinstance(chosen, int) else chosen


def _devices(pool: Pool) -> str:
    listed = ",".join(map(str, pool.devices))
    return f"{_count(pool.gpus, 'GPU')}: {listed} on {'one node' if pool.nodes == 1 else f'each of {pool.nodes} nodes'}"


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _memory(title: str, memory: Memory) -> Table:
    """Return a table with one row per term and one column per phase; terms of different phases do not overlap."""
    table = Table(box=SIMPLE_HEAD, title=f"\nmemory, {title}", title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("term")
    for phase in memory.phases:
        table.add_column(phase if phase != "always" else "", justify="right")
    table.add_column("")
    names = dict.fromkeys(term.name for term in memory.terms)
    for name in names:
        terms = [term for term in memory.terms if term.name == name]
        cells = [gib(sum(t.bytes for t in terms if t.when in ("always", phase))) for phase in memory.phases]
        shown = [
            cell if any(t.when in ("always", p) for t in terms) else ""
            for cell, p in zip(cells, memory.phases, strict=True)
        ]
        table.add_row(name, *shown, terms[0].note)
    totals = [gib(memory.total(phase)) for phase in memory.phases]
    limit = f"of {gib(memory.limit)}" if memory.limit is not None else ""
    table.add_section()
    table.add_row("total", *totals, limit, style="bold")
    return table
