"""The page's sections of numbers and words: header, alarms, advisories, summary, faults, configs. Pure."""

import math
from collections.abc import Callable, Sequence

from megarl.report.page import html
from megarl.report.page.figures import not_drawn
from megarl.report.page.html import BarPart, Html, escape, join, legend, stacked, table, tag
from megarl.report.reading.advisories import advise, replica_rates, rollout_idle, trainer_idle
from megarl.report.reading.metrics_file import NO_SIGNAL, RunMetrics, is_graded
from megarl.report.reading.run_directory import ReportedRun, differences
from megarl.report.reading.run_events import COUNTED_FAULTS, RunFault

LONGEST_VALUE = 200  # characters of a config value
MOST_STEPS = 8  # named per alarm rule


def chip(index: int, run: ReportedRun) -> Html:
    """Return the name of a run with its color."""
    return tag("span", tag("i", class_=f"run{index}"), run.name, class_="chip")


def header(runs: Sequence[ReportedRun]) -> Html:
    """Return one card per run with its status."""
    cards = []
    for index, (run, missing) in enumerate(zip(runs, not_drawn([run.metrics for run in runs]), strict=True)):
        steps = _last_step(run.metrics)
        of = f" of {run.planned_steps:,}" if run.planned_steps else ""
        lines = [f"step {steps:,}{of}", html.duration(run.metrics.largest("total/wall_seconds"))]
        if run.metrics.width > 1:
            lines.append(f"a point of a plot is {run.metrics.width} steps: their mean")
        if run.status in ("running", "silent"):
            lines.append(f"last metric {html.duration(max(0.0, run.read_at - run.written_at))} before this report")
        cards.append(
            tag(
                "div", tag("div", chip(index, run), tag("span", run.status, class_=f"status {run.status}")),
                tag("div", " · ".join(lines)), tag("div", _origin(run)),
                tag("div", run.reason, class_="reason") if run.reason else "",
                tag("div", f"Not in the plots: {missing}.", class_="quiet") if missing else "",
                tag("div", str(run.path), class_="path"), class_="card",
            )
        )  # fmt: skip
    return tag("div", cards, class_="cards")


def _origin(run: ReportedRun) -> str:
    """Return the model of a run, and what it was started with and where."""
    parts = [f"model {run.config['model.path']}"] if "model.path" in run.config else []
    if (start := run.start) is not None:
        commit = f" at commit {start.commit}" if start.commit else ""
        parts += [f"megarl {start.version}{commit}", f"{start.device} on {start.host}"]
    return " · ".join(parts)


def alarm_steps(run: ReportedRun) -> list[tuple[int, str]]:
    """Return the step and rule of each alarm whose step is known."""
    return [(fault.step, fault.rule) for fault in run.events.faults if fault.is_alarm and fault.step is not None]


def alarms(runs: Sequence[ReportedRun]) -> Html:
    """Return the alarms of each run, one box per rule and replica, with the text of the newest one."""
    items = []
    for index, run in enumerate(runs):
        rules: dict[str, list[RunFault]] = {}
        for fault in run.events.faults:
            if fault.is_alarm:
                rules.setdefault(fault.text.partition(":")[0].removeprefix("alarm "), []).append(fault)
        for rule, found in rules.items():
            steps = [str(fault.step) for fault in found if fault.step is not None]
            hidden = len(steps) - MOST_STEPS
            newest = found[-1]
            after = f" after {html.duration(newest.after_s)}" if newest.after_s is not None else ""
            where = ", ".join(steps[-MOST_STEPS:]) + (f" and {hidden} before" if hidden > 0 else "")
            items.append(
                tag(
                    "li", chip(index, run) if len(runs) > 1 else "",
                    tag("b", f"{rule} in step{'s' * (len(steps) > 1)} {where}" if steps else rule),
                    tag("p", f"{newest.text.partition(': ')[2]}; {newest.outcome or 'it has not ended'}{after}"),
                    data_alarm=newest.rule,
                )
            )  # fmt: skip
    if not items:
        return tag("p", "None.", class_="quiet")
    note = tag("p", "Dashed lines in the plots are the steps in which alarms began.", class_="quiet")
    return join([tag("ul", items, class_="advisories alarms"), note])


def advisories(runs: Sequence[ReportedRun]) -> Html:
    """Return the advisories of each run."""
    items = []
    for index, run in enumerate(runs):
        for advisory in advise(run.metrics, run.layout):
            items.append(
                tag(
                    "li", chip(index, run) if len(runs) > 1 else "", tag("b", advisory.title), tag("p", advisory.text),
                    data_advisory=advisory.key,
                )
            )  # fmt: skip
    if not items:
        return tag("p", "Nothing: no phase took far longer than usual, few responses were aborted or cut, most groups "
                   "had a signal, and neither side waited for the other.", class_="quiet")  # fmt: skip
    return tag("ul", items, class_="advisories")


def summary(runs: Sequence[ReportedRun]) -> Html:
    """Return a table of the main numbers, with a column per run."""
    metrics = [run.metrics for run in runs]
    rows: list[list[str]] = [
        ["Reward, last tenth of the steps", *(_number(each.average("reward/mean", 0.1)) for each in metrics)],
    ]
    for name in dict.fromkeys(name for each in metrics for name in each.evaluations):
        for kind in ("greedy", "sampled"):
            cells = [_first_and_last(each, name, kind) for each in metrics]
            if any(cells):
                rows.append([f"{name}, {kind}: first → last", *(cell or html.MISSING for cell in cells)])
    for title, form, value in _SHOWN:
        values = [value(each) for each in metrics]
        if not all(map(math.isnan, values)):
            rows.append([title, *map(form, values)])
    rates = [replica_rates(each) for each in metrics]
    if any(len(each) > 1 for each in rates):
        rows.append(["Engines, tokens/s: slowest, mean, fastest", *map(_engines, rates)])
    return table(["", *(run.name for run in runs)], rows, "summary")


def _number(value: float) -> str:
    return html.MISSING if math.isnan(value) else f"{value:.3g}"


def _share(value: float) -> str:
    return html.share(value, 1)


def _job_speed(metrics: RunMetrics) -> float:
    return _rate(metrics.sum("batch/trained_tokens"), metrics.sum("time/step"))


def _trainer_speed(metrics: RunMetrics) -> float:
    return _rate(metrics.sum("batch/trained_tokens"), metrics.sum("time/logprobs") + metrics.sum("time/update"))


def _rollout_speed(metrics: RunMetrics) -> float:
    new = metrics.sum("batch/response_tokens") - metrics.sum("batch/reused_tokens")
    return _rate(new + metrics.sum("rollout/replaced_tokens"), metrics.sum("rollout/engine_seconds"))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.nan


def _mean(name: str) -> Callable[[RunMetrics], float]:
    return lambda metrics: metrics.average(name)


_Row = tuple[str, Callable[[float], str], Callable[[RunMetrics], float]]
_SHOWN: tuple[_Row, ...] = (
    ("Whole job, tokens/s", html.amount, _job_speed),
    ("Trainer, tokens/s while it trains", html.amount, _trainer_speed),
    ("Rollout, tokens/s while engines run", html.amount, _rollout_speed),
    ("Time of a step", html.duration, _mean("time/step")),
    ("Trainer waits for rollouts", _share, trainer_idle),
    ("Engines have no work", _share, rollout_idle),
    ("Staleness, updates", _number, _mean("batch/staleness_mean")),
    ("Groups without signal", _share, _mean(NO_SIGNAL)),
    ("Response length, tokens", html.amount, _mean("rollout/response_length_mean")),
    ("Responses cut at the limit", _share, _mean("rollout/truncated_share")),
    ("Largest rank's tokens over the mean", _number, _mean("batch/dp_imbalance")),
)


def _engines(rates: dict[str, float]) -> str:
    if not rates:
        return html.MISSING
    slowest, fastest = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    mean = sum(rates.values()) / len(rates)
    if len(rates) == 1:
        return html.amount(mean)
    return (
        f"{html.amount(rates[slowest])} (replica {slowest}), {html.amount(mean)}, "
        f"{html.amount(rates[fastest])} (replica {fastest})"
    )


def _first_and_last(metrics: RunMetrics, name: str, kind: str) -> str:
    points = [point.values for point in metrics.evaluations.get(name, []) if kind in point.values]
    if not points:
        return ""
    texts = [
        html.interval(
            values.get(f"{kind}_low", math.nan),
            values.get(f"{kind}_high", math.nan),
            values[kind],
            graded=is_graded(points),
        )
        for values in (points[0], points[-1])
    ]
    return " → ".join(texts if len(points) > 1 else texts[:1])


# The trainer's phases, with their titles and colors.
_TRAINER = (
    ("update", "update", "work1"), ("logprobs", "log-probs", "work2"), ("generate", "waits for rollouts", "wait1"),
    ("drain", "waits for running responses", "wait2"), ("queue", "reads the queue", "load1"),
    ("sync", "weight sync", "load2"), ("save", "saves", "load3"), ("eval", "evaluation", "load4"),
    ("other", "other", "load5"),
)  # fmt: skip


def time_budget(runs: Sequence[ReportedRun]) -> Html:
    """Return bars of how trainer and engines of each run spent the time of all steps."""
    rows = []
    used: dict[str, str] = {}
    for index, run in enumerate(runs):
        parts = [BarPart(title, run.metrics.sum(f"time/{phase}"), color) for phase, title, color in _TRAINER]
        whole = sum(part.value for part in parts)
        if whole <= 0:
            continue
        used |= {part.name: part.color for part in parts if part.value > 0}
        rows.append(tag("div", chip(index, run), " trainer", class_="who"))
        rows.append(stacked(parts, whole, unit="s"))
        idle = rollout_idle(run.metrics)
        if not math.isnan(idle):
            engines = [BarPart("an engine runs", 1 - idle, "work1"), BarPart("no engine runs", idle, "wait1")]
            rows.append(tag("div", chip(index, run), " rollout", class_="who"))
            rows.append(stacked(engines, 1.0))
    if not rows:
        return tag("p", "No step has ended yet.", class_="quiet")
    return tag("div", rows, legend(list(used.items())), class_="budget")


def engines(runs: Sequence[ReportedRun]) -> Html:
    """Return a bar per engine of runs with several, the slowest first: a mean would hide a slow one."""
    blocks = []
    for index, run in enumerate(runs):
        rates = replica_rates(run.metrics)
        top = max(rates.values(), default=0.0)
        if not top or len(rates) < 2:  # the rollout plot shows a single engine
            continue
        shown = sorted(rates.items(), key=lambda item: item[1])[:32]
        rows = [
            tag(
                "div", tag("span", f"replica {name}", class_="who"),
                tag("div", tag("i", class_=f"run{index}", style=f"width:{100 * rate / top:.1f}%"), class_="track"),
                tag("span", f"{html.amount(rate)} tokens/s"), class_="engine",
            )
            for name, rate in shown
        ]  # fmt: skip
        left = len(rates) - len(shown)
        more = tag("p", f"{left} faster engines are not shown.", class_="quiet") if left else ""
        blocks.append(tag("div", chip(index, run) if len(runs) > 1 else "", rows, more, class_="engines"))
    return join([tag("h3", "Each engine"), tag("div", blocks, class_="side")]) if blocks else Html("")


def faults(runs: Sequence[ReportedRun]) -> Html:
    """Return what was lost or failed in each run, with its outcome, from metrics, events and notices."""
    blocks = []
    for index, run in enumerate(runs):
        counted = []
        for name, how, what, outcome in COUNTED_FAULTS:
            value = run.metrics.sum(name) if how == "sum" else run.metrics.largest(name)
            if value > 0:
                counted.append([f"{value:,.0f}", what, outcome])
        parts = [table(["number", "what happened", "outcome"], counted, "counted")] if counted else []
        if not all(fault.is_alarm for fault in run.events.faults):
            parts.append(_fault_table(run))
        if run.notices:
            lines = [tag("li", tag("time", html.moment(notice.at)), escape(notice.text)) for notice in run.notices]
            parts.append(tag("details", tag("summary", f"{len(lines)} newest notices of the pool"), tag("ul", lines)))
        if not parts:
            parts.append(tag("p", "Nothing was lost and nothing failed.", class_="quiet"))
        blocks.append(tag("div", chip(index, run) if len(runs) > 1 else "", parts))
    return tag("div", blocks, class_="side")


def _fault_table(run: ReportedRun) -> Html:
    rows = [
        [
            html.moment(fault.at), "" if fault.step is None else f"step {fault.step}", fault.kind, fault.text,
            fault.outcome + (f" (after {html.duration(fault.after_s)})" if fault.after_s is not None else "")
            if fault.outcome else "no recovery is recorded",
        ]
        for fault in reversed(run.events.faults)
        if not fault.is_alarm
    ]  # fmt: skip
    return table(["when", "", "part", "fault", "outcome"], rows, "faults")


def configs(runs: Sequence[ReportedRun]) -> Html:
    """Return the differences between the runs' configs, and each whole config, folded."""
    parts = []
    if len(runs) > 1:
        rows = differences([run.config for run in runs])
        cells = [[key, *(value[:LONGEST_VALUE] for value in values)] for key, values in rows.items()]
        names = ["", *(run.name for run in runs)]
        parts.append(table(names, cells, "config") if rows else tag("p", "The configs are equal.", class_="quiet"))
    for run in runs:
        values = [[key, value[:LONGEST_VALUE]] for key, value in run.config.items()]
        title = tag("summary", f"All {len(values)} values of {run.name}")
        if values:
            parts.append(tag("details", title, table(["key", "value"], values, "config")))
    return join(parts)


def _last_step(metrics: RunMetrics) -> int:
    value = metrics.largest("step")
    return 0 if math.isnan(value) else int(value)
