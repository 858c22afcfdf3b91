"""The parts of the screen of `megarl top`: each is a title and lines of text, made from a `RunView`."""

from __future__ import annotations

import itertools
import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from megarl.cli.top.run_view import RunView
from megarl.common.rundir.notices import printable
from megarl.report.reading.metrics_file import is_graded
from megarl.report.reading.run_events import COUNTED_FAULTS
from megarl.telemetry.metrics.progress import ACCURACY, WINDOW, are_graded, compact, duration, rollout_speed
from megarl.telemetry.metrics.timer import PHASES

# Numbers, sparklines and bars as text for a terminal.

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"
MISSING = "-"


def number(value: float, style: str = "compact") -> str:
    """Format a value by a format specification, `compact` or `time`; `-` for NaN."""
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return str(value)
    if style == "compact":
        return compact(value)
    return duration(value) if style == "time" else format(value, style)


def percent(value: float) -> str:
    """Return a share in percent with three digits, below 0.05% as 0%; `-` for NaN."""
    if not math.isfinite(value):
        return MISSING
    return f"{100 * value:.3g}%" if abs(value) >= 0.0005 else "0%"


def thinned(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: means of neighboring ones, without NaN."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * index // width for index in range(width + 1)]
    parts = ([v for v in values[low:high] if math.isfinite(v)] for low, high in itertools.pairwise(edges))
    # Divide before adding: the sum of large values may overflow.
    return [math.fsum(v / len(part) for v in part) if part else math.nan for part in parts]


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a line of at most `width` characters, from the lowest to the highest value; a blank for NaN."""
    shown = thinned(values, width)
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = 1.0 if math.isfinite(high - low) else 0.5  # the difference of the largest floats overflows
    span = high * scale - low * scale
    steps = len(blocks) - 1

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return blocks[round((value * scale - low * scale) / span * steps) if span else steps // 2]

    return "".join(map(block, shown))


def bar(share: float, width: int, full: str = "█", empty: str = "░") -> str:
    """Return a bar of `width` characters for a share of 0 to 1; empty for NaN."""
    filled = 0 if math.isnan(share) else round(min(1.0, max(0.0, share)) * width)
    return full * filled + empty * (width - filled)


RECENT = 20  # steps over which waiting is averaged
TREND = 60  # steps of a sparkline
LABEL = 10  # characters of a line's name
SLOW = 6.0  # a step that takes this many times the median is marked
IDLE = 0.3  # idle share from which a side is marked
FULL = 0.95  # share of a KV cache in use from which it is marked
_STATUS_STYLE = {
    "running": "green", "starting": "green", "finished": "bold green", "preempted": "yellow", "silent": "yellow",
    "failed": "bold red", "ended": "bold red", "unknown": "red",
}  # fmt: skip


@dataclass(frozen=True)
class ScreenPart:
    """One part of the screen. `empty`: it has no content, and may be left out."""

    title: str
    lines: Sequence[Text]
    empty: bool = False


@dataclass(frozen=True)
class Signs:
    """The characters for charts: those of the terminal's encoding."""

    blocks: str = BLOCKS
    full: str = "█"
    hollow: str = "░"
    dash: str = "─"

    @classmethod
    def of(cls, encoding: str) -> Signs:
        """Return the characters that an encoding has."""
        return cls() if encoding.lower().startswith("utf") else cls(ASCII_BLOCKS, "#", ".", "-")


def head(view: RunView, width: int, signs: Signs) -> list[Text]:
    """Return the lines above all sections: the progress of the run, and the titles of advisories, if any."""
    first = Text.assemble((_plain(view.name), "bold"), "  ", (view.status, _STATUS_STYLE.get(view.status, "")))
    if view.reason:
        first.append(f"  {_plain(view.reason)}", "yellow")
    done = view.step / view.planned if view.planned else math.nan
    of = f"/{view.planned} {percent(done)}" if view.planned else ""
    place, second = Text(f"step {view.step}{of} "), Text()
    if math.isfinite(view.eta_s):
        second.append(f" eta {number(view.eta_s, 'time')}", "bold")
    second.append(f"  ran {number(view.value('total/wall_seconds'), 'time')}")
    second.append(f"  {number(view.value('time/step'), '.3g')} s/step")
    times = sorted(value for value in view.series("time/step", TREND) if math.isfinite(value))
    late = bool(times) and view.status == "running" and view.since_step_s > SLOW * times[len(times) // 2]
    if view.status in ("running", "silent", "unknown"):
        second.append(f"  last step {number(view.since_step_s, 'time')} ago", "yellow" if late else "")
    elif view.steps:
        second.append(f"  ended {_clock(view.value('wall_time'), view.now, always='%Y-%m-%d %H:%M')}")
    if (room := width - place.cell_len - second.cell_len) >= 5:
        place.append(bar(done, min(30, room), signs.full, signs.hollow), "green")
    advice = textwrap.wrap("; ".join(view.advice), max(20, width - LABEL), max_lines=2, placeholder=" …")
    labels = ("advice", "")
    advised = [
        Text.assemble((label.ljust(LABEL), "cyan"), (text, "yellow"))
        for label, text in zip(labels, advice, strict=False)
    ]
    return [first, place.append_text(second), *advised]


def reward(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """Reward, accuracy, groups without signal, and lengths."""
    error = view.value("reward/stderr")
    spread = f" ±{number(error, '.2g')}" if math.isfinite(error) else ""
    graded = are_graded(view.steps)
    signal = f"no signal {percent(view.newest('monitor/no_signal_share', RECENT)[0])}"
    solved = f", right {percent(view.value('groups/solve_all'))}, wrong {percent(view.value('groups/solve_none'))}"
    lines = [
        _trend(view, "reward", "reward/mean", width, signs, more=spread),
        *([] if graded else [_trend(view, "accuracy", ACCURACY, width, signs, show=percent)]),
        _line("groups", signal + ("" if graded else solved)),
        _trend(view, "length", "rollout/response_length_mean", width, signs,
               more=f" max {number(view.value('rollout/response_length_max'))}"),
        _line("cut", f"{percent(view.value('rollout/truncated_share'))} truncated, "
              f"{percent(view.value('rollout/aborted_share'))} aborted"),
    ]  # fmt: skip
    return ScreenPart("reward", lines)


def evaluation(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """The newest evaluation of each set, with its interval and the change since the one before."""
    lines = []
    for name, rows in view.evaluations.items():
        for kind in ("greedy", "sampled"):
            values = [row.get(f"eval/{name}/{kind}") for row in rows]
            found = [value for value in values if value is not None]
            if not found:
                continue
            low, high = (rows[-1].get(f"eval/{name}/{kind}_{end}") for end in ("low", "high"))
            text = Text(f"{_plain(name)[:12]} {kind} ")
            keys = ("graded", "greedy", "sampled")
            graded = is_graded([{key: row.get(f"eval/{name}/{key}") or 0.0 for key in keys} for row in rows])
            scale = 1 if graded else 100
            text.append(number(found[-1], ".3g") if graded else percent(found[-1]), "bold")
            if low is not None and high is not None:
                text.append(f" [{scale * low:.3g}, {scale * high:.3g}]", "dim")
            if len(found) > 1:
                change = scale * (found[-1] - found[-2])
                text.append(f" {change:+.3g}", "green" if change > 0 else "red" if change < 0 else "")
            text.append(f" step {number(float(rows[-1].get('eval/step') or 0), '.0f')}", "dim")
            lines.append(text)
    return ScreenPart("evaluation", lines or [Text("none so far", "dim")], not lines)


def update(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """Measurements that show whether the update is healthy."""
    kl, name = view.value("policy/kl_ref"), "kl to ref"
    if math.isnan(kl):
        kl, name = view.value("policy/approx_kl"), "kl"
    lines = [
        _trend(view, "entropy", "policy/entropy", width, signs),
        _trend(view, "grad norm", "policy/grad_norm", width, signs),
        _line(name, f"{number(kl, '.2e')}  clipped {percent(view.value('policy/clip_fraction'))}"
              f"  ESS {number(view.value('policy/ess'), '.3f')}"),
        _line("mismatch", f"k3 {number(view.value('mismatch/k3_kl'), '.2e')}"
              f"  ESS {number(view.value('mismatch/ess'), '.3f')}  lr {number(view.value('policy/lr'), '.2g')}"),
    ]  # fmt: skip
    return ScreenPart("update", lines)


def throughput(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """Tokens per second of both sides, the slowest and the fastest of several engines."""
    first = max(0, len(view.steps) - TREND)
    smooth = [rollout_speed(view.steps[max(0, end - WINDOW) : end]) for end in range(first + 1, len(view.steps) + 1)]
    lines = [
        _chart("rollout", f"{number(smooth[-1] if smooth else math.nan)} tok/s", smooth, width, signs),
        _trend(view, "trainer", "perf/trainer_tokens_per_second", width, signs, more=" tok/s"),
    ]
    speeds = view.replicas()
    if len(speeds) > 1:
        slowest, fastest = min(speeds, key=speeds.__getitem__), max(speeds, key=speeds.__getitem__)
        text = _line("engines", f"min {number(speeds[slowest])} (replica {slowest}), ")
        text.append(f"max {number(speeds[fastest])} ({fastest})")
        if speeds[slowest] < speeds[fastest] / 2:
            text.stylize("yellow")
        lines.append(text)
    mfu = view.value("perf/trainer_mfu")
    whole = f"{number(view.value('perf/tokens_per_second'))} tok/s"
    if view.on_gpus and math.isfinite(per_gpu := view.value("perf/tokens_per_second_per_gpu")):
        whole += f", {number(per_gpu)} per GPU"
    lines.append(_line("whole job", whole + (f", MFU {percent(mfu)}" if math.isfinite(mfu) else "")))
    return ScreenPart("throughput", lines)


def waiting(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """The idle share of each side over the newest steps, and the phases of the last step."""
    room = max(4, min(20, width - LABEL - 22))
    lines = []
    idle = view.share(("time/generate", "time/drain"), "time/step", RECENT)
    for name, share in (("trainer", idle), ("engines", view.mean_by_time("rollout/idle_ratio", RECENT))):
        text = _line(name, "")
        text.append(bar(share, room, signs.full, signs.hollow), "yellow" if share > IDLE else "green")
        text.append(f" idle {percent(share)}")
        lines.append(text)
    phases = [(phase, view.value(f"time/{phase}")) for phase in (*PHASES, "other")]
    least = 0.005 * view.value("time/step")
    largest = sorted((item for item in phases if item[1] > least), key=lambda item: -item[1])[:4]
    shown = [f"{name} {number(value, '.2g')}s" for name, value in largest]
    while len(shown) > 1 and LABEL + len("  ".join(shown)) > width:
        shown.pop()
    lines.append(_line("last step", "  ".join(shown) or "-"))
    return ScreenPart(f"waiting, newest {min(RECENT, len(view.steps))} steps", lines)


def rollout(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """Version lag, the queue, and the engines."""
    lines = [
        _trend(view, "lag", "rollout/version_lag_mean", width, signs,
               more=f" max {number(view.value('rollout/version_lag_max'), '.0f')}"),
        _trend(view, "queue", "rollout/queue_depth", width, signs, more=" groups"),
        *_engines(view),
        _line("replicas", f"{number(view.value('rollout/replicas_alive'), '.0f')} alive, "
              f"{number(view.value('rollout/replicas_lost'), '.0f')} lost, "
              f"{number(view.value('rollout/replicas_idle'), '.0f')} idle" + _workers(view)),
    ]  # fmt: skip
    return ScreenPart("rollout", lines)


def _engines(view: RunView) -> list[Text]:
    """Return the lines of KV cache and requests: the current loads of engines, else the peaks of the newest step."""
    if view.loads:
        usage = {index: load.kv_usage for index, load in view.loads.items()}
        low, high = min(usage, key=usage.__getitem__), max(usage, key=usage.__getitem__)
        kv = f"{percent(usage[low])} (replica {low}) to {percent(usage[high])} (replica {high})"
        if len(usage) == 1:
            kv = percent(usage[high])
        running = sum(load.running for load in view.loads.values())
        queued = sum(load.waiting for load in view.loads.values())
        requests, full = f"{running} running, {queued} waiting", usage[high]
    else:
        full = view.value("rollout/kv_usage_max")
        kv = f"at most {percent(full)}"
        peaks = [number(view.value(f"rollout/{name}_max"), ".0f") for name in ("running", "waiting")]
        requests = f"{peaks[0]} running, {peaks[1]} waiting in an engine, at most"
    first = _line("KV cache", kv)
    if full >= FULL:
        first.stylize("yellow")
    return [first, _line("requests", requests)]


def _workers(view: RunView) -> str:
    alive = view.value("rollout/workers_alive")
    return f", {alive:.0f} agent workers" if math.isfinite(alive) else ""


def faults(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """The newest faults with their outcome, and the counts of the metrics."""
    lines = []
    for fault in reversed(view.faults):
        kind = "" if fault.is_alarm else f"{fault.kind}: "  # its text begins with the word
        text = Text(f"{_clock(fault.at, view.now)} {kind}", "red" if not fault.outcome else "")
        text.append(_plain(fault.text))
        after = f" after {number(fault.after_s, 'time')}" if fault.after_s is not None else ""
        outcome = f"{_plain(fault.outcome)}{after}" if fault.outcome else "no outcome so far"
        text.append(f" {'->' if signs.dash == '-' else '→'} {outcome}", "green" if fault.outcome else "yellow")
        lines.append(text)
    counted = []
    for name, how, what, _ in COUNTED_FAULTS:
        known = [value for value in view.series(name, len(view.steps)) if math.isfinite(value)]
        if (count := math.fsum(known) if how == "sum" else max(known, default=0.0)) > 0:
            counted.append(f"{count:.0f} {what}")
    if counted:
        lines.insert(0, Text(f"in the newest {len(view.steps)} steps: " + ", ".join(counted), "yellow"))
    return ScreenPart("faults", lines or [Text("none", "dim")], not lines)


def notices(view: RunView, width: int, signs: Signs) -> ScreenPart:
    """The newest notices of the pool, the newest first."""
    lines = [Text(f"{_clock(at, view.now)} {_plain(text)}") for at, text in reversed(view.notices)]
    return ScreenPart("notices", lines or [Text("none", "dim")], not lines)


LEFT: tuple[Callable[[RunView, int, Signs], ScreenPart], ...] = (reward, evaluation, update)
RIGHT: tuple[Callable[[RunView, int, Signs], ScreenPart], ...] = (throughput, waiting, rollout)


def _line(name: str, text: str) -> Text:
    return Text.assemble((name.ljust(LABEL), "cyan"), text)


def _trend(
    view: RunView, name: str, metric: str, width: int, signs: Signs, *, more: str = "",
    show: Callable[[float], str] = number,
) -> Text:  # fmt: skip
    """Return a line with a metric's newest value, its age in steps if it is older, and its sparkline."""
    newest, ago = view.newest(metric, RECENT)
    value = f"{show(newest)}{more}" + (f" ({ago} ago)" if ago else "")
    return _chart(name, value, view.series(metric, TREND), width, signs)


def _chart(name: str, value: str, series: Sequence[float], width: int, signs: Signs) -> Text:
    text = Text.assemble((name.ljust(LABEL), "cyan"), (value, "bold"))
    column = LABEL + 18
    room = min(24, width - max(column, LABEL + len(value) + 1))
    if room >= 4:
        text.append(" " * max(1, column - LABEL - len(value)))
        text.append(sparkline(series, room, signs.blocks), "blue")
    return text


def _plain(text: str) -> str:
    """Return a text as one line without control characters."""
    return " ".join(printable(text).split())


def _clock(at: float, now: float, always: str = "") -> str:
    """Return the time of day, or the date if it is long ago, or by the format `always`; blanks if it is unknown."""
    try:
        return time.strftime(always or ("%H:%M:%S" if now - at < 86400 else "%m-%d %H:%M"), time.localtime(at))
    except (ValueError, OverflowError, OSError):  # NaN, or out of range
        return " " * 8
