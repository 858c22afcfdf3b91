"""The state of a run that `megarl top` shows, and the watch that reads it from the run's files."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from megarl.common.rundir import rotating_lines
from megarl.common.rundir.json_lines import read_json_lines
from megarl.common.rundir.run_files import read_start
from megarl.common.rundir.run_lock import CLAIM_FILE
from megarl.report.reading.advisories import GpuLayout, advise
from megarl.report.reading.metrics_file import metrics_of
from megarl.report.reading.run_directory import Notice, layout_of, read_notices, status_of
from megarl.report.reading.run_events import RunFault, pair
from megarl.telemetry.trace.files import EventTail, RunEvent

StepRow = dict[str, float | None]

TAIL_BYTES = 4 << 20  # read from the end of each part of metrics.jsonl: some hundred steps
MOST_ROWS = 512
IS_STEP = "time/step"  # lines of steps have it, lines of evaluations do not
MOST_FAULTS = 2000  # events that are kept
LOADS_S = 120.0  # how long the load that an engine reported is shown
_ROW = msgspec.json.Decoder(StepRow)
_REPLICA = "rollout/replica_tokens_per_second/"


def recent_rows(path: Path) -> list[StepRow]:
    """Return the newest rows of metrics.jsonl, the oldest first: those at the end of its two newest parts.

    Skips incomplete lines. Of steps that a resumed run repeated, only the later rows are returned. Raises OSError.
    """
    rows: deque[StepRow] = deque(maxlen=MOST_ROWS)
    for _, part in rotating_lines.parts(path)[-2:]:
        for _, row in read_json_lines(part, _ROW, max(0, part.stat().st_size - TAIL_BYTES)):
            if row.get("step") is None:
                continue
            # An evaluation has the same step as the line before it.
            step = row["step"] or 0.0
            while rows and ((last := rows[-1]["step"] or 0.0) > step or (last == step and IS_STEP in row)):
                rows.pop()
            rows.append(row)
    return list(rows)


@dataclass(frozen=True)
class Load:
    """The newest load of one engine. `at`: Unix seconds; `kv_usage`: the share of its KV cache in use."""

    at: float
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True)
class RunView:
    """A run at one moment. `steps`: the newest step lines of metrics.jsonl, `evaluations`: the newest ones by set.

    `status`: running, silent, starting, finished, preempted, failed, ended or unknown; `now`: Unix seconds.
    """

    name: str
    path: Path
    status: str
    reason: str
    planned: int
    now: float
    steps: Sequence[StepRow] = ()
    evaluations: Mapping[str, Sequence[StepRow]] = field(default_factory=dict)
    faults: Sequence[RunFault] = ()
    notices: Sequence[Notice] = ()
    loads: Mapping[int, Load] = field(default_factory=dict)
    advice: Sequence[str] = ()  # titles of the report's advisories on these steps
    on_gpus: bool = False

    def value(self, name: str) -> float:
        """Return a metric of the newest step; NaN if it has none."""
        return _number(self.steps[-1], name) if self.steps else math.nan

    def newest(self, name: str, most: int) -> tuple[float, int]:
        """Return the newest value of a metric among `most` steps, and how many steps ago it was; (NaN, 0) if none."""
        for ago, row in enumerate(reversed(list(self.steps)[-most:])):
            if math.isfinite(value := _number(row, name)):
                return value, ago
        return math.nan, 0

    def series(self, name: str, most: int) -> list[float]:
        """Return a metric of the newest `most` steps; NaN where one has none."""
        return [_number(row, name) for row in list(self.steps)[-most:]]

    def share(self, parts: Sequence[str], whole: str, most: int) -> float:
        """Return the sum of `parts` over the sum of `whole` in the newest `most` steps; NaN without a whole."""
        total = _sum(self.series(whole, most))
        return sum(_sum(self.series(part, most)) for part in parts) / total if total else math.nan

    def mean_by_time(self, name: str, most: int) -> float:
        """Return the mean over the newest `most` steps, each weighted by its time; NaN without a value."""
        pairs = zip(self.series(name, most), self.series(IS_STEP, most), strict=True)
        known = [(value, seconds) for value, seconds in pairs if math.isfinite(value) and math.isfinite(seconds)]
        total = math.fsum(seconds for _, seconds in known)
        return math.fsum(value * seconds for value, seconds in known) / total if total else math.nan

    def replicas(self) -> dict[str, float]:
        """Return the tokens per second of each engine in the newest step, by its index."""
        newest = self.steps[-1] if self.steps else {}
        found = {name[len(_REPLICA) :]: _number(newest, name) for name in newest if name.startswith(_REPLICA)}
        return {replica: speed for replica, speed in found.items() if math.isfinite(speed)}

    @property
    def step(self) -> int:
        """The newest finished step."""
        value = self.value("step")
        return int(value) if math.isfinite(value) else 0

    @property
    def since_step_s(self) -> float:
        """Seconds since the newest step was written; NaN without one."""
        return max(0.0, self.now - self.value("wall_time"))

    @property
    def eta_s(self) -> float:
        """Seconds to the end of the run, as its newest step estimated them; NaN if it is not running."""
        if self.status not in ("running", "silent"):
            return math.nan
        return max(0.0, self.value("time/eta") - self.since_step_s)


class RunWatch:
    """Reads a run's files; each `look` reads what is new. Raises FileNotFoundError if there is no run."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise FileNotFoundError(f"there is no run directory {run_dir}")
        if not any((run_dir / name).exists() for name in ("metrics.jsonl", "config.yaml", CLAIM_FILE)):
            raise FileNotFoundError(
                f"{run_dir} has neither metrics.jsonl nor config.yaml: give the directory of a run, its run.dir"
            )
        self._run_dir = run_dir
        self._rows: list[StepRow] = []
        self._rows_of: tuple[int, ...] = ()  # inode, size and time of the file when they were read
        self._events = EventTail(run_dir, {"fault", "recovery"})
        self._load_events = EventTail(run_dir, {"load"})
        self._faults: list[RunEvent] = []
        self._loads: dict[int, Load] = {}
        self._looked = -math.inf  # when loads were read, Unix seconds
        self._advised: StepRow | None = None  # the newest step for which `_titles` were made
        self._titles: list[str] = []

    def look(self) -> RunView:
        """Return the run as it is now."""
        now = time.time()
        self._read_rows()
        self._faults = [*self._faults, *self._events.poll()][-MOST_FAULTS:]
        self._read_loads(now)
        steps = [row for row in self._rows if IS_STEP in row]
        name, planned, layout = _described(self._run_dir)
        newest = _number(steps[-1], "wall_time") if steps else math.nan
        status, reason = status_of(self._run_dir, now - newest)
        return RunView(
            name, self._run_dir, status, reason, planned, now, steps, _by_set(self._rows), pair(self._faults),
            read_notices(self._run_dir), self._loads, self._advice(steps, layout),
            layout is not None and layout.unit == "GPUs",
        )  # fmt: skip

    def _read_rows(self) -> None:
        """Read metrics.jsonl if it has changed; keep the old rows if it cannot be read."""
        path = self._run_dir / "metrics.jsonl"
        with suppress(OSError):
            facts = path.stat()
            if (now := (facts.st_ino, facts.st_size, facts.st_mtime_ns)) != self._rows_of:
                self._rows, self._rows_of = recent_rows(path), now

    def _advice(self, steps: Sequence[StepRow], layout: GpuLayout | None) -> Sequence[str]:
        """Return the titles of `megarl report`'s advisories on these steps; computed once per new step."""
        if steps and steps[-1] is not self._advised:
            self._advised = steps[-1]
            found = advise(metrics_of(steps), layout, f"over the newest {len(steps)} steps")
            self._titles = [advisory.title for advisory in found]
        return self._titles if steps else ()

    def _read_loads(self, now: float) -> None:
        since = max(now - LOADS_S, self._looked)
        for event in self._load_events.poll(since=since):
            number = _index(event)
            if number is not None and event.begin >= self._loads.get(number, Load(0.0, 0, 0, 0.0)).at:
                running, waiting, usage = (float(event.args.get(key, 0)) for key in ("running", "waiting", "kv_usage"))
                self._loads[number] = Load(event.begin, int(running), int(waiting), usage)
        self._looked = now - LOADS_S
        self._loads = {number: load for number, load in self._loads.items() if load.at >= now - LOADS_S}


def _described(run_dir: Path) -> tuple[str, int, GpuLayout | None]:
    """Return name, planned steps and GPUs of a run; its directory's name, 0 and None without a readable config."""
    try:
        tree = yaml.load((run_dir / "config.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
        return str(tree["run"]["name"]), int(tree["run"]["steps"]), layout_of(tree, read_start(run_dir))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError, ValueError):
        return run_dir.resolve().name, 0, None


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _by_set(rows: Sequence[StepRow]) -> dict[str, list[StepRow]]:
    """Return the lines of evaluations by their set, the newest last."""
    found: dict[str, list[StepRow]] = {}
    for row in rows:
        for name in {key.split("/")[1] for key in row if key.startswith("eval/") and key.count("/") == 2}:
            found.setdefault(name, []).append(row)
    return found


def _index(event: RunEvent) -> int | None:
    """Return the index of the engine that an event of `replica-I` is about."""
    if event.replica is not None:
        return event.replica
    name, _, number = event.process.rpartition("-")
    return int(number) if name == "replica" and number.isdigit() else None


def _number(row: StepRow, name: str) -> float:
    value = row.get(name)
    return math.nan if value is None else float(value)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(value for value in values if math.isfinite(value))
