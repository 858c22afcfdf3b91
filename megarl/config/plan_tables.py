"""Renders the plan as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from megarl.config.deadlines import group_deadline_s
from megarl.config.marked_yaml import WIDTH, marked_yaml
from megarl.config.megatron_defaults import passes_recompute
from megarl.config.memory import Memory
from megarl.config.plan import RunPlan, gib
from megarl.config.pools import Pool
from megarl.config.schema import Config


def print_dry_run(plan: RunPlan, given: Config, stream: TextIO, notes: Sequence[str] = ()) -> None:
    """Write the resolved config (YAML) and the plan to `stream`, with colours only if it is a terminal.

    `given`: the config as it was loaded, by which what the user has set is told from defaults; `notes` end the plan.
    """
    text = marked_yaml(given, plan.config)
    console = Console(file=stream, width=None if stream.isatty() else WIDTH, highlight=False)
    console.print(Text("# resolved config: lines are set by the file or the command line", style="bold"))
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"))
    else:
        stream.write(text)
    console.print(render_plan(plan))
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"))


def render_plan(plan: RunPlan) -> RenderableType:
    """Return the summary, the memory of both pools, and the notes."""
    parts: list[RenderableType] = [
        Text("\n# plan", style="bold"),
        _pairs(_summary(plan)),
        _memory("trainer, per " + _unit(plan), plan.trainer),
        _memory("rollout, per " + _unit(plan), plan.engine.memory),
    ]
    parts += [
        _memory(f"teacher {each.name}, per {_unit(plan)}", each.memory)
        for each in plan.teachers
        if each.memory is not None
    ]
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    return Group(*parts)


def _unit(plan: RunPlan) -> str:
    return "GPU" if plan.device == "cuda" else "process"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _summary(plan: RunPlan) -> Iterable[tuple[str, str]]:
    """Yield (name, value) of each line of the summary."""
    layout, info = plan.layout, plan.info
    parts = [f"TP {layout.tensor}", f"PP {layout.pipeline}", f"DP {layout.data}"]
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
        yield f"teacher {teacher.name}", f"{_count(teacher.replicas, 'engine')} of {width}"
    if plan.device == "cuda":
        where = "same nodes" if plan.pools.shared else "nodes of its own"
        yield "trainer devices", _devices(plan.pools.trainer)
        yield "rollout devices", f"{_devices(plan.pools.rollout)} ({where})"
    yield "step", f"{_count(plan.groups_per_step, 'group')}, {plan.samples_per_step} samples"
    yield "update", f"up to {plan.samples_per_update} samples"
    yield "micro-batch", _micro_batch(plan)
    yield "recompute", _recompute(plan.config)
    yield "group deadline", _deadline(plan.config)
    yield "sequence", f"up to {plan.max_sequence_tokens} tokens, {plan.max_response_tokens} of them response"
    if plan.engine.kv_tokens is not None:
        room, each = plan.engine.kv_tokens, plan.engine.kv_bytes_per_token
        yield "KV cache", f"{room} tokens per engine, {each} bytes per token on each {_unit(plan)}"


def _micro_batch(plan: RunPlan) -> str:
    tokens, most = plan.config.trainer.token_limit, plan.most_tokens
    more = f"; {most} would fit with a tenth of the memory free" if most is not None and most > tokens else ""
    return f"up to {tokens} tokens{more}"


def _deadline(config: Config) -> str:
    seconds, bound = group_deadline_s(config), config.timeouts.generate_s
    if seconds is None:
        return (
            f"none; a response that takes {bound:g} s (timeouts.generate_s) fails its group, or ends the run if the "
            "trainer has waited for it from its start"
        )
    default = "" if config.rollout.group_deadline_s is not None else ", nine tenths of timeouts.generate_s"
    end = "are cut" if config.rollout.on_group_deadline == "cut" else "fail their group"
    return f"{seconds:g} s after its start{default}; responses that are unfinished then {end}"


def _recompute(config: Config) -> str:
    if passes_recompute(config):
        return "as set in megatron.transformer"
    chosen = config.trainer.recompute
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
    table = Table(box=SIMPLE_HEAD, title=f"memory, {title}", title_justify="left", title_style="bold", pad_edge=False)
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
