"""A run's plan as text: its summary, a table of memory per pool, and its config."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import yaml
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from megarl.common.errors import FIRST_PROMPT, Findings
from megarl.common.values import counted, gib
from megarl.config.derived.pools import Pool
from megarl.config.derived.staleness import group_deadline_s, pace_of
from megarl.config.loading.load import level, ordered
from megarl.config.megatron.reserved import passes_recompute
from megarl.config.memory_plan.memory import Memory
from megarl.config.memory_plan.plan import RunPlan, fused_layers
from megarl.config.memory_plan.shared_gpus import SharedMemory
from megarl.config.schema import Config, MegatronConfig, RolloutConfig, TrainerConfig
from megarl.config.schema.job import CheckpointConfig

# A config as YAML: lines for what the user has set, and comments with each section's defaults. Basic keys first.

WIDTH = 100
FROM_AUTO = "  # the plan's choice for auto"


def marked_yaml(given: Config, resolved: Config, *, whole: bool = True) -> str:
    """Return YAML that `load_config` reads to a config with the values of `resolved`.

    `given`: the config as loaded, which knows what file and overrides set. Values that the plan chose for `auto` are
    lines too, marked as such. `whole`: with the defaults.
    """
    return "".join(f"{line}\n" for line in _lines(given, resolved, whole))


def _lines(given: BaseModel, resolved: BaseModel, whole: bool, prefix: str = "") -> Iterator[str]:
    """Yield the lines of a section: what is set and, if `whole`, comments with all other defaults.

    `prefix`: the section's key and a dot.
    """
    plain, indent = resolved.model_dump(mode="json"), "  " * prefix.count(".")
    defaults: dict[str, list[str]] = {"basic": [], "expert": []}
    for name in ordered(type(resolved), prefix):
        own, value = getattr(given, name), getattr(resolved, name)
        if isinstance(value, BaseModel) and isinstance(own, BaseModel):
            if _is_set(own) or own != value:
                yield f"{indent}{name}:"
                yield from _lines(own, value, whole, f"{prefix}{name}.")
            else:
                defaults[level(prefix + name)].append(f"{name}: {_flow(plain[name])}")
        elif own != value:
            yield from (f"{indent}{line}{FROM_AUTO}" for line in _block({name: plain[name]}))
        elif name in given.model_fields_set:
            shown = given.model_dump(mode="json", include={name}, exclude_unset=True)
            yield from (f"{indent}{line}" for line in _block(shown))
        else:
            defaults[level(prefix + name)].append(f"{name}: {_flow(plain[name])}")
    for each, values in defaults.items() if whole else ():
        if values and prefix:
            yield from _comment(f"{'expert default' if each == 'expert' else 'default'}: {', '.join(values)}", indent)
        else:
            yield from (line for value in values for line in _comment(value, indent))


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _is_set(section: BaseModel) -> bool:
    """Return whether the user has set any key of a section, or of one inside it."""
    values = [getattr(section, name) for name in section.model_fields_set]
    return any(not isinstance(value, BaseModel) or _is_set(value) for value in values)


def _block(values: dict[str, Any]) -> list[str]:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=WIDTH).splitlines()


def _flow(value: object) -> str:
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=True)
    return text.strip().removesuffix("...").strip()


def print_dry_run(plan: RunPlan, given: Config, stream: TextIO, found: Findings, *, whole: bool = False) -> None:
    """Write data, plan and config (YAML) to `stream`, with colours only on a terminal.

    `given`: the config as loaded, which knows what the user has set. `whole`: with defaults. The warnings and notes of
    `found` and of the plan come last.
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


def _summary(plan: RunPlan) -> Iterable[tuple[str, str]]:
    """Yield (name, value) of each line of the summary."""
    layout, info = plan.layout, plan.info
    stages = layout.stage_layers(info.num_layers)
    uneven = f" ({' + '.join(map(str, stages))} layers)" if len(set(stages)) > 1 else ""
    parts = [f"TP {layout.tensor}", f"PP {layout.pipeline}{uneven}", f"DP {layout.data}"]
    parts += [f"CP {layout.context}"] if layout.context > 1 else []
    parts += [f"VPP {layout.virtual_pipeline}"] if layout.virtual_pipeline else []
    parts += ["SP"] if layout.sequence else []
    if info.num_experts:
        parts += [f"EP {layout.expert}", f"ETP {layout.etp}", f"expert DP {layout.expert_data}"]
    moe = f", {plan.active_parameters / 1e9:.3g} B active" if info.num_experts else ""
    size = plan.parameters
    count = f"{size / 1e9:.3g} B" if size >= 1e9 else f"{size / 1e6:.3g} M"
    yield "device path", "CUDA" if plan.device == "cuda" else "CPU (gloo, emulated CUDA calls)"
    yield "model", f"{info.family}, {info.num_layers} layers, {count} parameters{moe}"
    yield "trainer", f"{counted(plan.ranks, 'rank')}: {' · '.join(parts)}"
    engines = counted(plan.replicas, "engine")
    more = f", places for {plan.most_replicas}" if plan.most_replicas > plan.replicas else ""
    width = f"{counted(plan.engine_gpus, _unit(plan))}{'' if plan.replicas == 1 else ' each'}"
    yield "rollout", f"{engines} of {width}{more}"
    for teacher in plan.teachers:
        width = f"{counted(teacher.engine_gpus, _unit(plan))}{'' if teacher.replicas == 1 else ' each'}"
        where = "" if teacher.gpu_share is None else f", on the policy's, of which it takes {teacher.gpu_share:g}"
        yield f"teacher {teacher.name}", f"{counted(teacher.replicas, 'engine')} of {width}{where}"
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
        modules = (
            "Transformer Engine's" if fused_layers(cuda=True) else "Megatron-Core's own: Transformer Engine is not here"
        )
        yield "trainer modules", modules
        yield "host memory", _host_memory(plan)
    if plan.shared is not None:
        yield "shared GPUs", _shared(plan.shared, plan.pools.trainer.gpus_per_node)
    yield "weights load", _loading(plan)
    yield "step", f"{counted(plan.groups_per_step, 'group')}, {plan.samples_per_step} samples"
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
    often = "as often as takes at most 2% of the time" if auto else f"every {counted(int(settings.every), 'step')}"
    return f"{often}, and the last step; the newest {settings.keep_last} are kept"


def _host_memory(plan: RunPlan) -> str:
    """Return the host memory of a trainer node for a save and an offloaded reference, in addition to processes."""
    of_rank = plan.trainer.term("optimizer").bytes + plan.trainer.term("weights").bytes // plan.layout.dense_data
    of_rank += sum(
        term.bytes for term in plan.trainer.terms if term.name == "reference weights" and term.when != "always"
    )
    node = of_rank * plan.pools.trainer.gpus_per_node
    routes = ""
    if plan.config.trainer.router_replay != "none":
        row = plan.max_sequence_tokens * sum(plan.info.moe_layers) * plan.info.topk
        most = row * (1 if (plan.info.num_experts or 0) <= 256 else 2) * plan.samples_per_step // plan.layout.data
        routes = f"; the experts of a step, up to {gib(most)} per rank"
    # torch's allocator of pinned memory rounds each block up to a power of two.
    return f"up to {gib(of_rank)} pinned per rank, {gib(node)} per trainer node, once more for rounding{routes}"


def _shared(shared: SharedMemory, ranks: int) -> str:
    return (
        f"{gib(shared.host)} of each rank's state in host memory while engines generate, {gib(shared.host * ranks)} "
        f"per node; about {shared.move_s:.1f} s each way (estimate); kept meanwhile: {gib(shared.parked)} by a parked "
        f"rank, {gib(shared.asleep)} by an engine asleep"
    )


def _loading(plan: RunPlan) -> str:
    """Return how engines are expected to load new weights; the log reports at the first sync what they did."""
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
    split, ranks = "", plan.layout.context
    if ranks > 1:
        split = f", {-(-tokens // ranks)} on each of {ranks} context-parallel ranks"
    more = f"; {most} would fit with a tenth of the memory free" if most is not None and most > tokens else ""
    return f"up to {tokens} tokens{split}{more}"


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
    return f"the first {counted(chosen, 'layer')} of each stage" if isinstance(chosen, int) else chosen


def _devices(pool: Pool) -> str:
    listed = ",".join(map(str, pool.devices))
    return (
        f"{counted(pool.gpus, 'GPU')}: {listed} on {'one node' if pool.nodes == 1 else f'each of {pool.nodes} nodes'}"
    )


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
