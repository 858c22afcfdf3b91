"""The plots of the page as data: lines of runs with their bands and units. Pure.

`report.js` draws them. Numbers are rounded to four digits, because more are not visible.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.report.reading.downsample import Floats
from megarl.report.reading.metrics_file import NO_SIGNAL, Evaluation, RunMetrics, is_graded, mean_interval

MOST_COMPONENTS = 6
MOST_SETS = 4
MOST_NAMES = 12  # of things that are not shown
_COMPONENT = "reward/component/"
_FAMILIES = {
    _COMPONENT: "reward components",
    "rollout/replica_tokens_per_second/": "engines",
    "rollout/version_lag_tokens/": "tokens by version lag",
}


@dataclass(frozen=True)
class Line:
    """A line of a plot: values `y` with a band from `low` to `high`, all [B] with NaN where there is none.

    `x`: its steps and hours; None: those of the run's series. `style`: the dash pattern; `dots`: mark each value.
    """

    run: int
    label: str
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    x: tuple[Floats, Floats] | None = None
    style: int = 0
    dots: bool = False


@dataclass(frozen=True)
class Figure:
    """A plot. `unit`: of its y axis, `share` for a percentage."""

    key: str
    title: str
    unit: str
    note: str
    lines: list[Line] = field(default_factory=list)

    @property
    def is_zero(self) -> bool:
        """Whether all values are 0."""
        return not any(np.nan_to_num(line.y).any() for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """Return the data for the page's script."""
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "lines": [_line(line) for line in self.lines],
        }


def _line(line: Line) -> dict[str, Any]:
    content: dict[str, Any] = {"run": line.run, "label": line.label, "style": line.style, "y": rounded(line.y)}
    if line.low is not None and line.high is not None and not np.array_equal(line.low, line.high, equal_nan=True):
        content |= {"low": rounded(line.low), "high": rounded(line.high)}
    if line.x is not None:
        content["x"] = {"step": rounded(line.x[0], 9), "hours": rounded(line.x[1], 6)}
    if line.dots:
        content["dots"] = True
    return content


def rounded(values: Iterable[float], digits: int = 4) -> list[float | int | None]:
    """Return values with `digits` significant digits, whole numbers as integers, and None for non-finite ones."""
    result: list[float | int | None] = []
    for value in values:
        short = float(f"{value:.{digits}g}")
        if not math.isfinite(short):
            result.append(None)
        else:
            result.append(int(short) if short.is_integer() and abs(short) < 1e15 else short)
    return result


def run_axis(metrics: RunMetrics) -> dict[str, list[float | int | None]]:
    """Return the positions of a run's buckets: mean step, and hours of the run's wall time."""
    return {"step": rounded(metrics.mean("step"), 9), "hours": rounded(run_hours(metrics), 6)}


def run_hours(metrics: RunMetrics) -> Floats:
    """Return the hours [B] from the run's start to each bucket, without the time between two starts."""
    if metrics.has("total/wall_seconds"):
        return metrics.mean("total/wall_seconds") / 3600
    wall = metrics.mean("wall_time")
    return (wall - wall[0]) / 3600 if len(wall) else wall


Make = Callable[[int, RunMetrics], list[Line]]


def _series(name: str, label: str = "", style: int = 0, band: tuple[str, str] | None = None) -> Make:
    """Return a maker of a series' line: the mean of each bucket, between its extremes or those of two other series."""

    def make(run: int, metrics: RunMetrics) -> list[Line]:
        if not metrics.has(name):
            return []
        lowest, highest = band if band is not None and all(map(metrics.has, band)) else (name, name)
        return [Line(run, label, metrics.mean(name), metrics.low(lowest), metrics.high(highest), style=style)]

    return make


def _reward(run: int, metrics: RunMetrics) -> list[Line]:
    if not metrics.has("reward/mean"):
        return []
    low, high = mean_interval(metrics)
    return [Line(run, "", metrics.mean("reward/mean"), low, high)]


def _components(run: int, metrics: RunMetrics) -> list[Line]:
    names = metrics.family(_COMPONENT)[:MOST_COMPONENTS]
    return [Line(run, name[len(_COMPONENT) :], metrics.mean(name), style=number) for number, name in enumerate(names)]


def _verdicts(run: int, metrics: RunMetrics) -> list[Line]:
    """Return the shares of groups that are all right or all wrong, unless a step had rewards other than 0 and 1."""
    if metrics.count("reward/accuracy").sum() < metrics.count("reward/mean").sum():
        return []
    shown = (("all right", "groups/solve_all"), ("all wrong", "groups/solve_none"))
    return [Line(run, label, metrics.mean(name), style=number) for number, (label, name) in enumerate(shown, start=1)]


def _replicas(run: int, metrics: RunMetrics) -> list[Line]:
    """Return the slowest and fastest engine of each bucket; nothing for a run with one engine."""
    if len(metrics.family("rollout/replica_tokens_per_second/")) < 2:
        return []
    lines = []
    for number, (end, pick) in enumerate((("min", metrics.low), ("max", metrics.high))):
        name = f"rollout/replica_tokens_per_second_{end}"
        if metrics.has(name):
            label = "slowest engine" if end == "min" else "fastest engine"
            lines.append(Line(run, label, pick(name), style=number))
    return lines


def _lengths(run: int, metrics: RunMetrics) -> list[Line]:
    name = "rollout/response_length_"
    if metrics.has(f"{name}p50"):
        p10, p90 = metrics.mean(f"{name}p10"), metrics.mean(f"{name}p90")
        return [
            Line(run, "median, p10 to p90", metrics.mean(f"{name}p50"), p10, p90),
            Line(run, "p99", metrics.mean(f"{name}p99"), style=1),
            Line(run, "longest", metrics.high(f"{name}max"), style=2),
        ]
    if not metrics.has(f"{name}mean"):
        return []
    return [
        Line(run, "mean", metrics.mean(f"{name}mean")),
        Line(run, "longest", metrics.high(f"{name}max"), style=2),
    ]


@dataclass(frozen=True)
class _Plan:
    section: str
    figure: Figure
    make: tuple[Make, ...]


_PLANS = [
    _Plan("learning", Figure("reward", "Reward", "reward", "Mean reward of the samples, with its 95% interval over "
          "prompt groups (over samples in runs without reward/stderr)."), (_reward,)),
    _Plan("learning", Figure("components", "Reward components", "reward", "Mean of each named component."),
          (_components,)),
    _Plan("learning", Figure("signal", "Groups without signal", "share", "Groups that were filtered because their "
          "rewards are equal; for rewards of 0 and 1 also those of the batch that are all right or all wrong."),
          (_series(NO_SIGNAL, "filtered"), _verdicts)),
    _Plan("update", Figure("loss", "Loss", "loss", "The objective that was differentiated."),
          (_series("policy/loss"),)),
    _Plan("update", Figure("entropy", "Entropy of the policy", "nats", "Per token."),
          (_series("policy/entropy"),)),
    _Plan("update", Figure("kl", "KL", "nats", "Per token, by the estimator k3: from the policy before the step, and "
          "from the reference where there is one."), (_series("policy/approx_kl", "from before the step"),
                                                      _series("policy/kl_ref", "from the reference", 1))),
    _Plan("update", Figure("clip", "Clipped tokens", "share", "Share of the tokens whose ratio was clipped."),
          (_series("policy/clip_fraction"),)),
    _Plan("update", Figure("ess", "Effective sample size", "share", "Of the ratios new / old policy during the update, "
          "and trainer / engine before it; 100% on policy."),
          (_series("policy/ess", "new / old"), _series("mismatch/ess", "trainer / engine", 1))),
    _Plan("update", Figure("mismatch", "Engine against trainer", "nats", "k3 estimate of KL(engine ‖ trainer) per "
          "token, before the first update of the step."), (_series("mismatch/k3_kl"),)),
    _Plan("update", Figure("grad", "Gradient norm", "norm", "Before clipping."), (_series("policy/grad_norm"),)),
    _Plan("update", Figure("lr", "Learning rate", "", "Of the last update of the step."), (_series("policy/lr"),)),
    _Plan("speed", Figure("rollout", "Rollout", "tokens/s", "Response tokens of all engines over the time in which any "
          "ran."), (_series("perf/rollout_tokens_per_second"),)),
    _Plan("speed", Figure("replicas", "Slowest and fastest engine", "tokens/s", "Each engine over the time in which it "
          "had work; the lowest and the highest of each bucket."), (_replicas,)),
    _Plan("speed", Figure("trainer", "Trainer", "tokens/s", "Trained tokens over log-prob and update time."),
          (_series("perf/trainer_tokens_per_second"),)),
    _Plan("speed", Figure("job", "Whole job", "tokens/s", "Trained tokens over the time of the step."),
          (_series("perf/tokens_per_second"),)),
    _Plan("speed", Figure("step", "Time of a step", "s", "Without evaluation."), (_series("time/step"),)),
    _Plan("speed", Figure("memory", "Memory", "GiB", "Highest use of any trainer rank so far (of its GPU's memory, if "
          "it has one), and the present one of rank 0 on its host."),
          (_series("perf/trainer_peak_memory_gib", "trainer, peak"),
           _series("perf/host_memory_gib", "host, rank 0", 1))),
    _Plan("speed", Figure("generate", "Time to generate a sample", "s", "Median and p99 of the batch, mean of each "
          "bucket."), (_series("rollout/generate_seconds_p50", "median"),
                       _series("rollout/generate_seconds_p99", "p99", 1))),
    _Plan("waiting", Figure("idle_trainer", "Trainer waits for rollouts", "share", "Share of the step."),
          (_series("time/trainer_idle_ratio"),)),
    _Plan("waiting", Figure("idle_rollout", "Engines have no work", "share", "Share of the time between two batches in "
          "which no engine ran."), (_series("rollout/idle_ratio"),)),
    _Plan("queue", Figure("depth", "Queue depth", "groups", "Finished groups waiting when a batch was taken."),
          (_series("rollout/queue_depth"),)),
    _Plan("queue", Figure("staleness", "Staleness of trained samples", "updates", "Updates between the oldest token's "
          "weights and those that it trains. Line: mean; band: up to the oldest sample."),
          (_series("batch/staleness_mean", band=("batch/staleness_mean", "batch/staleness_max")),)),
    _Plan("queue", Figure("kv", "KV cache in use", "share", "Of the fullest engine."),
          (_series("rollout/kv_usage_max"),)),
    _Plan("lengths", Figure("lengths", "Response length", "tokens", "Over the samples of a step."), (_lengths,)),
    _Plan("lengths", Figure("truncated", "Cut at the limit, or aborted", "share", "Share of responses."),
          (_series("rollout/truncated_share", "cut"), _series("rollout/aborted_share", "aborted", 1))),
]  # fmt: skip


def figures_of(section: str, runs: Sequence[RunMetrics]) -> list[Figure]:
    """Return the plots of a section for which any run has values."""
    figures = []
    for plan in _PLANS:
        if plan.section != section:
            continue
        lines = [line for make in plan.make for number, run in enumerate(runs) for line in make(number, run)]
        if lines:
            base = plan.figure
            figures.append(Figure(base.key, base.title, base.unit, base.note, lines))
    return figures


def evaluation_figures(runs: Sequence[RunMetrics]) -> list[Figure]:
    """Return a plot for each evaluated set: greedy and sampled scores with their 95% intervals."""
    figures = []
    for number, name in enumerate(_drawn_sets(runs)):
        lines = [
            line
            for style, kind in enumerate(("greedy", "sampled"))
            for index, run in enumerate(runs)
            if (line := _evaluated(index, run.evaluations.get(name, []), kind, style)) is not None
        ]
        if lines:
            graded = is_graded([point.values for run in runs for point in run.evaluations.get(name, [])])
            what, unit = ("score", "") if graded else ("accuracy", "share")
            note = f"Held-out {what} with its 95% interval: at temperature 0, and mean@k of sampled responses."
            figures.append(Figure(f"eval{number}", f"Evaluation: {name}", unit, note, lines))
    return figures


def _drawn_sets(runs: Sequence[RunMetrics]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.evaluations))[:MOST_SETS]


def not_drawn(runs: Sequence[RunMetrics]) -> list[str]:
    """Return for each run the names that plots and bars leave out, as text; empty if there are none."""
    drawn = _drawn_sets(runs)
    texts = []
    for run in runs:
        parts = [("evaluation sets", [name for name in run.evaluations if name not in drawn])]
        for prefix, title in _FAMILIES.items():
            beyond = run.family(prefix)[MOST_COMPONENTS:] if prefix == _COMPONENT else []
            names = [name[len(prefix) :] for name in beyond] + run.left_out.get(prefix, [])
            parts.append((title, names))
        texts.append("; ".join(f"{title} {_listed(names)}" for title, names in parts if names))
    return texts


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _evaluated(run: int, points: Sequence[Evaluation], kind: str, style: int) -> Line | None:
    """Return the line of a kind of score; None without points."""
    kept = [point for point in points if kind in point.values]
    if not kept:
        return None

    def column(name: str) -> Floats:
        return np.array([point.values.get(name, math.nan) for point in kept])

    steps, hours = np.array([float(p.step) for p in kept]), np.array([p.seconds / 3600 for p in kept])
    return Line(
        run, kind, column(kind), column(f"{kind}_low"), column(f"{kind}_high"), (steps, hours), style, dots=True
    )
