"""Reads metrics.jsonl and its older parts in one pass, and keeps what the report shows.

Memory grows by 80 bytes per step, for the medians of times.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from megarl.common.rundir import rotating_lines
from megarl.common.rundir.json_lines import read_json_lines
from megarl.report.reading.downsample import Buckets, Envelope, Floats
from megarl.telemetry.metrics.timer import PHASES

MetricsLine = dict[str, float | None]

BUCKETS = 800  # per series on the page, at most: more than a plot is wide
CHUNK_ROWS = 512
MOST_EVALUATIONS = 400  # shown for each set
PERIODIC = ("sync", "eval", "save")  # phases of only some steps
TIMED = ("step", *(phase for phase in PHASES if phase not in PERIODIC))
SPIKE = 6.0  # a phase spikes above this many times its median, if it also doubles the step
MOST_SPIKES = 0.05  # of the steps; more frequent ones are normal for the run

# Series of one number per step. Missing ones are left out.
SERIES = (
    "step", "wall_time", "total/wall_seconds",
    "reward/mean", "reward/std", "reward/stderr", "reward/errors", "reward/redone",
    "reward/accuracy", "groups/trained", "groups/filtered", "groups/solve_all", "groups/solve_none",
    "groups/dropped_stale", "groups/failed", "monitor/no_signal_share", "batch/samples", "batch/response_tokens",
    "batch/reused_tokens", "batch/failed_samples", "batch/trained_tokens",
    "batch/staleness_mean", "batch/staleness_max", "batch/dp_imbalance",
    "rollout/truncated_share", "rollout/aborted_share", "rollout/response_length_mean", "rollout/response_length_min",
    "rollout/response_length_max", "rollout/response_length_p10", "rollout/response_length_p50",
    "rollout/response_length_p90", "rollout/response_length_p99", "rollout/queue_depth", "rollout/idle_ratio",
    "rollout/engine_seconds", "rollout/replaced_tokens",
    "rollout/kv_usage_max", "rollout/running_max", "rollout/waiting_max", "rollout/generate_seconds_p50",
    "rollout/generate_seconds_p99", "rollout/generate_seconds_max", "rollout/replicas_alive", "rollout/replicas_lost",
    "rollout/continued", "rollout/cut", "rollout/rebuilds", "rollout/workers_lost", "rollout/groups_redone",
    "rollout/groups_kept", "rollout/replica_tokens_per_second_min", "rollout/replica_tokens_per_second_max",
    "perf/trainer_tokens_per_second", "perf/rollout_tokens_per_second", "perf/tokens_per_second",
    "perf/trainer_peak_memory_gib", "perf/host_memory_gib", "policy/loss", "policy/entropy", "policy/grad_norm",
    "policy/approx_kl", "policy/kl_ref", "policy/clip_fraction", "policy/ess", "policy/lr", "mismatch/ess",
    "mismatch/k3_kl", "sync/restarted_replicas", "sync/version", "time/step", "time/other",
    "time/trainer_idle_ratio", "total/groups_rolled_back", "total/failed_writes",
    *(f"time/{phase}" for phase in PHASES),
)  # fmt: skip
# Families of series that end with a name, and how many of them to keep.
FAMILIES = {
    "reward/component/": 12,
    "rollout/version_lag_tokens/": 64,
    "rollout/replica_tokens_per_second/": 256,
}
NO_SIGNAL = "derived/no_signal"  # share of the groups of a step whose samples all had the same reward
REWARD_VARIANCE = "derived/reward_variance"  # of the mean reward of a step
TRAINER_WAIT = "derived/trainer_wait"  # seconds of a step in which the trainer waited for rollouts
ROLLOUT_IDLE = "derived/rollout_idle"  # seconds of a step in which no engine ran, out of ROLLOUT_TIME
ROLLOUT_TIME = "derived/rollout_time"  # time/step, if it is known whether engines ran
DERIVED = (NO_SIGNAL, REWARD_VARIANCE, TRAINER_WAIT, ROLLOUT_IDLE, ROLLOUT_TIME)


@dataclass(frozen=True)
class Spike:
    """A step in which a phase took far longer than usual. `median`: in seconds, of the steps with this phase."""

    step: int
    phase: str
    seconds: float
    median: float


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one set in one evaluation, named without `eval/SET/`, and its time."""

    step: int
    seconds: float  # the run's wall time at the last step line before it
    values: Mapping[str, float]


@dataclass
class RunMetrics:
    """The content of metrics.jsonl for the report: down-sampled series by name, and numbers of the whole run."""

    names: list[str]
    buckets: Buckets
    width: int  # steps of a bucket
    steps: int  # lines of steps that were read
    spikes: list[Spike]  # the longest first, one for a step
    evaluations: dict[str, list[Evaluation]]
    left_out: dict[str, list[str]] = field(default_factory=dict)  # members of families beyond their bound, by prefix

    def __post_init__(self) -> None:
        self._index = {name: number for number, name in enumerate(self.names)}

    def has(self, name: str) -> bool:
        """Return whether any step has a value of a series."""
        number = self._index.get(name)
        return number is not None and bool(self.buckets.known[:, number].any())

    def mean(self, name: str) -> Floats:
        """Return the mean of each bucket [B]; NaN without values."""
        return self._column(self.buckets.mean, name)

    def low(self, name: str) -> Floats:
        """Return the lowest value of each bucket [B]; NaN without values."""
        return self._column(self.buckets.low, name)

    def high(self, name: str) -> Floats:
        """Return the highest value of each bucket [B]; NaN without values."""
        return self._column(self.buckets.high, name)

    def count(self, name: str) -> Floats:
        """Return the number of steps with a value in each bucket [B]."""
        return np.nan_to_num(self._column(self.buckets.known, name))

    def sum(self, name: str) -> float:
        """Return the sum over all steps; 0 without a value."""
        return self._sum(self.buckets.total, name)

    def average(self, name: str, last: float = 1.0) -> float:
        """Return the mean over the last share of the buckets; NaN without a value."""
        count = self._sum(self.buckets.known, name, last)
        return self._sum(self.buckets.total, name, last) / count if count else math.nan

    def ratio(self, name: str, per: str, last: float = 1.0) -> float:
        """Return the sum of a series over the sum of another, in the last share of the buckets; NaN without values.

        For times this is a share of the whole time, in which long steps count more.
        """
        whole = self._sum(self.buckets.total, per, last)
        known = whole > 0 and self._sum(self.buckets.known, name, last) > 0
        return self._sum(self.buckets.total, name, last) / whole if known else math.nan

    def _sum(self, values: Floats, name: str, last: float = 1.0) -> float:
        """Return the sum of a column over the last share of the buckets, at least one."""
        first = self.buckets.number - max(1, math.ceil(last * self.buckets.number))
        return float(np.nansum(self._column(values, name)[max(0, first) :]))

    def largest(self, name: str) -> float:
        """Return the largest value of any step; NaN without a value."""
        values = self.high(name)
        return float(np.nanmax(values)) if not np.isnan(values).all() else math.nan

    def family(self, prefix: str) -> list[str]:
        """Return the names of a family's series, in numeric order where they end with numbers."""
        names = [name for name in self.names if name.startswith(prefix)]
        return sorted(
            names,
            key=lambda name: (
                (0, int(name[len(prefix) :]), "") if name[len(prefix) :].lstrip("-").isdigit() else (1, 0, name)
            ),
        )

    def _column(self, values: Floats, name: str) -> Floats:
        number = self._index.get(name)
        return np.full(self.buckets.number, np.nan) if number is None else values[:, number]


class MetricsReader:
    """Collects any number of lines of metrics.jsonl."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._names = list(SERIES)
        self._seen = set(SERIES)
        self._envelope = Envelope(len(SERIES) + len(DERIVED), buckets)
        self._order = [*SERIES, *DERIVED]
        self._times: list[Floats] = []  # of the phases, each [N, phases + 1]; the last column is the step
        self._evaluations: dict[str, list[Evaluation]] = {}
        self._left_out: dict[str, list[str]] = {}
        self._seconds = 0.0

    def add(self, rows: Sequence[MetricsLine]) -> None:
        """Add consecutive lines."""
        steps = []
        for row in rows:
            if "eval/step" in row:
                self._add_evaluation(row)
            elif "time/step" in row:
                steps.append(row)
                self._seconds = row.get("total/wall_seconds") or self._seconds
        if steps:
            self._add_steps(steps)

    def result(self) -> RunMetrics:
        """Return the metrics of the lines so far."""
        envelope = self._envelope
        evaluations = {name: list(points) for name, points in self._evaluations.items()}
        return RunMetrics(
            list(self._order), envelope.buckets, envelope.width, envelope.rows, self._spikes(), evaluations,
            {prefix: list(names) for prefix, names in self._left_out.items()},
        )  # fmt: skip

    def _spikes(self) -> list[Spike]:
        times = np.nan_to_num(np.concatenate(self._times)) if self._times else np.empty((0, len(TIMED) + 1))
        found: dict[int, Spike] = {}
        usual = float(np.median(times[:, 0])) if len(times) else 0.0  # of a step
        for phase, seconds in zip(TIMED[1:], times.T[1:], strict=False):
            median = float(np.median(seconds[seconds > 0])) if seconds.any() else 0.0
            rows = np.flatnonzero(seconds > max(SPIKE * median, median + usual))
            for row in rows if len(rows) <= max(1.0, MOST_SPIKES * len(times)) else ():
                spike = Spike(int(times[row, -1]), phase, float(seconds[row]), median)
                if row not in found or found[row].seconds < spike.seconds:
                    found[row] = spike
        return sorted(found.values(), key=lambda spike: -spike.seconds)

    def _add_steps(self, steps: Sequence[MetricsLine]) -> None:
        for name in sorted(set().union(*steps) - self._seen):
            self._seen.add(name)
            self._extend(name)
        values = np.array([[row.get(name) for name in self._names] for row in steps], dtype=np.float64)
        values[np.isinf(values)] = np.nan
        column = {name: values[:, number] for number, name in enumerate(self._names)}
        self._times.append(np.column_stack([*(column[f"time/{phase}"] for phase in TIMED), column["step"]]))
        step_s, idle = column["time/step"], column["rollout/idle_ratio"]
        waits = np.nan_to_num(column["time/generate"]) + np.nan_to_num(column["time/drain"])
        known = np.where(np.isnan(idle), np.nan, step_s)
        derived = np.column_stack([no_signal(column), reward_variance(column), waits, idle * step_s, known])
        fixed = len(SERIES)
        self._envelope.add(np.hstack([values[:, :fixed], derived, values[:, fixed:]]))

    def _extend(self, name: str) -> None:
        """Begin a new series if it belongs to a family with room."""
        for prefix, most in FAMILIES.items():
            if name.startswith(prefix):
                if sum(each.startswith(prefix) for each in self._names) >= most:
                    self._left_out.setdefault(prefix, []).append(name[len(prefix) :])
                    return
                self._names.append(name)
                self._order.append(name)
                self._envelope.add_columns(1)

    def _add_evaluation(self, row: MetricsLine) -> None:
        sets: dict[str, dict[str, float]] = {}
        for name, value in row.items():
            parts = name.split("/", 2)
            if parts[0] == "eval" and len(parts) == 3 and value is not None:
                sets.setdefault(parts[1], {})[parts[2]] = value
        for name, values in sets.items():
            points = self._evaluations.setdefault(name, [])
            points.append(Evaluation(int(row.get("eval/step") or 0), self._seconds, values))
            if len(points) > 2 * MOST_EVALUATIONS:
                del points[1:-1:2]  # every second one, but not the first and last


def is_graded(points: Sequence[Mapping[str, float]]) -> bool:
    """Return whether a set's scores are not shares of correct responses; for older runs judged by their range."""
    return any(
        values.get("graded") or any(not 0 <= values.get(kind, 0.0) <= 1 for kind in ("greedy", "sampled"))
        for values in points
    )


def no_signal(column: Mapping[str, Floats]) -> Floats:
    """Return the share of each step's groups [N] that were filtered because of equal rewards.

    It is the run's share or, in lines without it, computed from the trained and filtered groups.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        counted = column["groups/filtered"] / (column["groups/trained"] + column["groups/filtered"])
    counted[~np.isfinite(counted)] = np.nan
    said = column["monitor/no_signal_share"]
    return np.where(np.isnan(said), counted, said)


def reward_variance(column: Mapping[str, Floats]) -> Floats:
    """Return the variance of each step's mean reward [N], over groups or, without that, over independent samples."""
    with np.errstate(invalid="ignore", divide="ignore"):
        independent = column["reward/std"] ** 2 / column["batch/samples"]
    independent[~np.isfinite(independent)] = np.nan
    return np.where(np.isnan(column["reward/stderr"]), independent, column["reward/stderr"] ** 2)


def mean_interval(metrics: RunMetrics) -> tuple[Floats, Floats]:
    """Return the ends of the 95% interval of each bucket's mean reward [B], taking steps as independent."""
    mean, count = metrics.mean("reward/mean"), metrics.count("reward/mean")
    variance = np.where(metrics.count(REWARD_VARIANCE) > 0, metrics.mean(REWARD_VARIANCE), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        half = 1.96 * np.sqrt(variance / count)
    return mean - half, mean + half


def read_metrics(path: Path, buckets: int = BUCKETS) -> RunMetrics:
    """Read metrics.jsonl and its older parts, while the run may write them. Missing files have no steps."""
    decoder = msgspec.json.Decoder(MetricsLine)
    files = [*(part for _, part in rotating_lines.older_parts(path)), path]
    return metrics_of((row for each in files for _, row in read_json_lines(each, decoder)), buckets)


def metrics_of(rows: Iterable[MetricsLine], buckets: int = BUCKETS) -> RunMetrics:
    """Return the metrics of consecutive lines of metrics.jsonl."""
    reader = MetricsReader(buckets)
    for chunk in _chunks(rows):
        reader.add(chunk)
    return reader.result()


def _chunks(rows: Iterable[MetricsLine]) -> Iterator[list[MetricsLine]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, CHUNK_ROWS)):
        yield chunk
