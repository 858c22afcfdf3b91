"""Reads everything that the report shows of a run from its directory, while the run may write it."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from megarl.common.rundir.json_lines import read_json_lines
from megarl.common.rundir.notices import notices_file, older_notices_file
from megarl.common.rundir.run_files import ExitRecordError, StartRecord, read_exit, read_start, stop_reason
from megarl.common.rundir.run_lock import Sighting
from megarl.report.reading.advisories import GpuLayout
from megarl.report.reading.metrics_file import RunMetrics, read_metrics
from megarl.report.reading.run_events import RunEvents, read_run_events
from megarl.report.reading.samples_file import SampleSet, read_samples

SILENT_S = 900.0  # without a step, a run on another host may have ended


def status_of(run_dir: Path, silent_s: float) -> tuple[str, str]:
    """Return the status of a run and its reason. `silent_s`: since its newest step; NaN without one.

    The status is that of the exit record, else running, silent, starting, ended or unknown.
    """
    try:
        record = read_exit(run_dir)
    except (ExitRecordError, OSError) as error:
        return "unknown", str(error)
    if record is not None:
        return record.status, record.reason
    stop = stop_reason(run_dir)
    said = f"stops at the next step: {stop}" if stop is not None else ""
    if (seen := Sighting.of(run_dir)) is None or seen.has_ended():
        return "ended", "it left no exit record: it was killed"
    if math.isnan(silent_s):
        return "starting", said
    if silent_s > SILENT_S:
        return "silent", said or "no step was written lately"
    return "running", said


MOST_NOTICES = 60  # the newest
NOTICE_BYTES = 256 << 10  # read of each file of notices


class Notice(NamedTuple):
    """A line that a process of the pool showed to the user. `at`: Unix seconds; NaN if missing."""

    at: float
    text: str


@dataclass(frozen=True)
class ReportedRun:
    """One run of the report."""

    name: str
    path: Path
    status: str  # see `status_of`
    reason: str
    planned_steps: int  # 0 if unknown
    read_at: float  # Unix seconds
    written_at: float  # Unix seconds of the last metrics; NaN without metrics
    config: Mapping[str, str]  # by dotted key, as text
    start: StartRecord | None
    layout: GpuLayout | None
    metrics: RunMetrics
    samples: SampleSet
    events: RunEvents
    notices: Sequence[Notice]


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each directory: the shortest distinct ends of their paths."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    names = ["/".join(each[-1:]) for each in parts]
    for length in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(set(parts)):
            break
        names = [
            "/".join(each[-length:]) if names.count(name) > 1 else name for each, name in zip(parts, names, strict=True)
        ]
    return names


def read_run(run_dir: Path, name: str, *, buckets: int, samples: int) -> ReportedRun:
    """Read a run, shown as `name`. `buckets`: maximum per series; `samples`: how many to show.

    Raises FileNotFoundError with what is missing if it is not a run's directory.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run directory {run_dir}")
    metrics_file, config_file = run_dir / "metrics.jsonl", run_dir / "config.yaml"
    if not metrics_file.is_file() and not config_file.is_file():
        raise FileNotFoundError(
            f"{run_dir} has neither metrics.jsonl nor config.yaml: give the directory of a run (run.dir of its config)"
        )
    tree = _config(config_file)
    written = metrics_file.stat().st_mtime if metrics_file.is_file() else math.nan
    status, reason = status_of(run_dir, time.time() - written)
    run_section, start = tree.get("run"), read_start(run_dir)
    steps = run_section.get("steps") if isinstance(run_section, Mapping) else 0
    return ReportedRun(
        name=name,
        path=run_dir,
        status=status,
        reason=reason,
        planned_steps=steps if isinstance(steps, int) else 0,
        read_at=time.time(),
        written_at=written,
        config=dict(flat(tree)),
        start=start,
        layout=layout_of(tree, start),
        metrics=read_metrics(metrics_file, buckets),
        samples=read_samples(run_dir, samples),
        events=read_run_events(run_dir),
        notices=read_notices(run_dir),
    )


def _config(path: Path) -> Mapping[str, object]:
    """Return the resolved config; empty if missing or damaged."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def flat(tree: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) of every leaf of a config."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree, default=str)


def differences(configs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the keys in which configs differ, each with its value in every config, or "" where it is missing."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [config.get(key, "") for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def layout_of(tree: Mapping[str, object], start: StartRecord | None = None) -> GpuLayout | None:
    """Return the GPUs of a resolved config; None if it lacks them. `start`: says whether the run is on a CPU."""
    trainer, rollout, admission = (tree.get(name) for name in ("trainer", "rollout", "admission"))
    if not (isinstance(trainer, Mapping) and isinstance(rollout, Mapping)):
        return None
    parallel = trainer.get("parallel")
    parallel = parallel if isinstance(parallel, Mapping) else {}
    mode = admission.get("mode") if isinstance(admission, Mapping) else None
    numbers = [
        trainer.get("gpus"), rollout.get("replicas"), rollout.get("tensor_parallel"),
        parallel.get("tensor", 1), parallel.get("pipeline", 1), parallel.get("expert", 1),
        parallel.get("expert_tensor") or parallel.get("tensor", 1), parallel.get("context", 1),
    ]  # fmt: skip
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    values = (int(number) for number in numbers)
    gpus, replicas, replica_gpus, tensor, pipeline, expert, expert_tensor, context = values
    # As `layout_problems` requires: dense and expert layers are each spread over all ranks.
    unit = math.lcm(tensor * context * pipeline, expert * expert_tensor * pipeline)
    word = "processes" if start is not None and start.device == "cpu" else "GPUs"
    return GpuLayout(gpus, unit, replicas, replica_gpus, mode == "sync", word, rollout.get("share_gpus") is True)


def read_notices(run_dir: Path) -> list[Notice]:
    """Return the newest notices of the pool, the newest last. An unreadable file has none."""
    found: list[Notice] = []
    for path in (older_notices_file(run_dir), notices_file(run_dir)):
        with suppress(OSError):
            start = max(0, path.stat().st_size - NOTICE_BYTES)
            found += [Notice(line.wall_time, line.text) for _, line in read_json_lines(path, _NOTICE, start)]
    return found[-MOST_NOTICES:]


class _NoticeLine(msgspec.Struct):
    text: str
    wall_time: float = math.nan


_NOTICE = msgspec.json.Decoder(_NoticeLine)
