"""The common parts of observability.py: the size of a step, a run's config and events, and the measured time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from megarl.config.load import config_from_tree
from megarl.config.schema import Config
from megarl.telemetry import events
from megarl.telemetry.declarations import REGISTRY

REPLICAS, LAGS = 4, 4  # of the run: replicas, and version lags of the tokens of a step
PAUSE_S = 0.01  # between two steps, in which the threads write; in a run they have a whole step for it


@dataclass(frozen=True)
class StepSize:
    """The size of one step of a run. `seconds`: its wall time; `engine_step_s`: that of one step of an engine.

    `cpu_seconds`: its processor time, of all processes of the run together. The default is that of the quickstart's
    task, asynchronous with one engine on two cores: 2.1 s for 384 samples (docs/benchmarks.md).
    """

    seconds: float = 1.0
    cpu_seconds: float = 1.4
    ranks: int = 1
    replicas: int = 1
    vocabulary: int = 320
    hidden: int = 128
    trajectories: int = 256
    turns: int = 1
    tokens: int = 50  # of a response
    mini_batches: int = 1
    micro_batches: int = 4  # of a rank, in the step
    engine_step_s: float = 0.02
    batch: int = 64  # requests of an engine step


def of_run(run_dir: Path, size: StepSize) -> StepSize:
    """Return the step of a run: medians over its steps but the first. Raises ValueError if it has fewer than three."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "time/step" in record][1:]
    if len(steps) < 2:
        raise ValueError(f"{run_dir}: at least three steps are needed")

    def median(name: str, default: float) -> float:
        return statistics.median(step.get(name, default) for step in steps)

    return replace(
        size,
        seconds=median("time/step", 0.0),
        trajectories=round(median("batch/samples", 0.0)),
        turns=max(1, round(median("agent/turns_mean", 1.0))),
        tokens=max(
            1, round(median("rollout/response_length_mean", size.tokens) / max(1.0, median("agent/turns_mean", 1.0)))
        ),
        mini_batches=max(1, round(median("policy/updates", 1.0))),
        **_of_config(run_dir / "config.yaml"),
    )


def _of_config(path: Path) -> dict[str, int]:
    """Return the processes and the sizes of the model's head of a run; what is not there stays as it is."""
    if not path.is_file():
        return {}
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = {"ranks": tree["trainer"]["gpus"], "replicas": tree["rollout"]["replicas"]}
    model = Path(tree["model"]["path"]) / "config.json"
    if model.is_file():
        sizes = json.loads(model.read_text(encoding="utf-8"))
        found |= {"vocabulary": sizes["vocab_size"], "hidden": sizes["hidden_size"]}
    return found


@contextmanager
def recording(directory: Path, process: str, **telemetry: str | int) -> Iterator[Config]:
    """Record the events of this process as one of the run, in `directory`; or nothing, without a process.

    `telemetry`: more of that section of the run's config.
    """
    directory.mkdir(exist_ok=True)
    tree = {
        "run": {"steps": 10**6, "dir": str(directory)}, "model": {"path": "model"}, "data": {"path": "data"},
        "batch": {"groups": 16, "samples_per_group": 16}, "sampling": {"max_tokens": 512},
        "trainer": {"gpus": 2}, "rollout": {"replicas": REPLICAS},
        "admission": {"mode": "async", "sync_interval": 1, "max_staleness": LAGS - 1},
        "telemetry": {"events": {"enabled": bool(process)}, **telemetry},
    }  # fmt: skip
    config = config_from_tree(tree)
    events.open_events(config, directory, process)
    try:
        yield config
    finally:
        events.close_events()


def cpu_per_step(step: Callable[[int], object], steps: int, end: Callable[[], object] = events.close_events) -> float:
    """Return the processor time of one step in seconds, of all threads; the first steps are not counted.

    `end`: has the threads write what they have not written yet, which counts.
    """
    warm_up = max(1, steps // 10)
    for number in range(warm_up):
        step(number)
    begin = time.process_time()
    for number in range(warm_up, warm_up + steps):
        step(number)
        time.sleep(PAUSE_S)
    if lost := events.lost_events():
        raise RuntimeError(f"{lost} events were lost, whose cost was not measured")
    end()
    return (time.process_time() - begin) / steps


def step_values() -> dict[str, float]:
    """Return a value of every metric that a step without evaluation can have, but those with a replica or a set."""
    names = [metric.name for metric in REGISTRY if "{" not in metric.name and not metric.name.startswith("eval/")]
    return dict.fromkeys(names, 1.000001)
