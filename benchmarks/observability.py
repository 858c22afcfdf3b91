#!/usr/bin/env python3
"""The cost of seeing a run: the calls of one step that record, judge and publish it, in processor time.

    .venv/bin/python benchmarks/observability.py --json observability.json
    .venv/bin/python benchmarks/observability.py --run runs/quickstart    # the step time and the numbers of that run

Each row makes the calls of many steps as the process of a run makes them, writes to real files, has a real client
scrape the Prometheus endpoint and a real server take the metrics of MLflow, and counts processor time of all threads
of this process, the writers' included: what the step would not take without them. The ratio is that time per step over
the step's wall time: with --run the median of the run, else --step-seconds. So a ratio of 0.01 is one hundredth of a
core. MLflow and wandb have to be installed, as `make setup-test` does.

The last row adds the rows up over all processes of the run: rank 0 with every sink at once, the events of the other
ranks, the controller, and each replica. Its ratio is that sum over the processor time of the same step in all of these
processes, because wall time says nothing of a sum over processes: it is the share of all the work of a step that goes
into seeing the run. While the run of --run lives, its processor time is measured over --watch steps; else it is
--step-cpu-seconds.
Longer loops than the run's are in a row of their own, which the sum leaves out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from megarl.telemetry.event_budget import CONTROLLER, rank_process, replica_process
from observability_base import StepSize, cpu_per_step, of_run, recording, step_values
from observability_entropy import of_entropy
from observability_job import cpu_of_job, cpu_of_step
from observability_monitor import of_monitor
from observability_services import of_mlflow, of_prometheus, of_wandb
from report import Ratio, add_options, finish

from megarl.rollout.batch_stats import BatchStats
from megarl.rollout.engine_load import EngineLoad
from megarl.rollout.replica_activity import ReplicaActivity
from megarl.rollout.request_times import RequestTimes
from megarl.rollout.requests import GenerateResult
from megarl.rollout.sample_times import SampleTimes
from megarl.telemetry import events
from megarl.telemetry.sinks import MetricsWriter

BOUND = 0.01
LOOP_TURNS = 8
LOOPS = f"trajectories of {LOOP_TURNS} turns in the controller"
WATCH_TIMEOUT_S = 600.0
PHASES = ("generate", "queue", "logprobs", "update", "drain", "sync", "save", "step")
CALLS = ("stage", "pause", "start", "update", "finish", "resume")


def of_rank(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The events of trainer rank 0 in one step: phases, mini-batches, one publication."""

    def step(number: int) -> None:
        now = time.monotonic()
        for phase in PHASES:
            events.record(phase, now, now + 0.1, key=number, step=number)
        for _ in range(size.mini_batches):
            events.record("mini_batch", now, now + 0.1, key=number, step=number, args={"samples": 9, "tokens": 999})
        for call in CALLS:
            events.record(f"sync_{call}", now, now + 0.1, key=number, version=number)
        events.record("publication", now, now + 0.1, key=number, version=number, args={"bytes": 10**9})

    with recording(directory, rank_process(0)):
        seconds = cpu_per_step(step, steps)
    return seconds, {"events": len(PHASES) + size.mini_batches + len(CALLS) + 1}


def of_sinks(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The metrics of one step as rank 0 writes them: metrics.jsonl, TensorBoard, the table, summary."""
    values = step_values()
    with recording(directory, "") as config, open(os.devnull, "w", encoding="utf-8") as terminal:
        writer = MetricsWriter.open(config, terminal)
        written = partial(writer.write, values=values)
        seconds = cpu_per_step(lambda number: written(number + 1), steps, writer.flush)
        writer.close()
    return seconds, {"metrics": len(values)}


def of_controller(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The times of all trajectories of one step, their events and the slowest ones, where the loops run."""
    result = GenerateResult("x", [1] * 50, [0.0] * 50, (), "stop", 0, 1.0, queue_s=0.1, prefill_s=0.1)

    def step(number: int) -> None:
        stats = BatchStats()
        for trajectory in range(size.trajectories):
            group, sample = number * size.trajectories + trajectory // 16, trajectory % 16
            begin = time.monotonic()
            times = SampleTimes(begin)
            for turn in range(size.turns):
                times.add_turn(result, 1.2)
                if events.are_wanted("turn", group):
                    events.record(
                        "turn", begin, begin + 1.2, key=group, group=group, sample=sample, replica=0, version=number,
                        args={"turn": turn, "tokens": 50, "queue_s": 0.3, "prefill_s": 0.1, "decode_s": 0.8},
                    )  # fmt: skip
            times.add("reward", 0.01)
            events.record("reward", begin, begin + 1.3, key=group, group=group, sample=sample, args={"error": 0})
            ended = times.end(group, sample, begin + 1.3, time.time())
            stats.note_times(ended)
            if events.are_wanted("trajectory", group):
                events.record(
                    "trajectory", begin, begin + 1.3, key=group, group=group, sample=sample, args=ended.args()
                )

    with recording(directory, CONTROLLER):
        seconds = cpu_per_step(step, steps)
    return seconds, {"trajectories": size.trajectories, "events": size.trajectories * (2 + size.turns)}


def of_replica(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The listeners to the engine during one step of the trainer, at each engine step and each output of it."""
    activity, times = ReplicaActivity(0), RequestTimes()
    engine_steps = max(1, round(size.seconds / size.engine_step_s))
    silent = SimpleNamespace(events=None)
    processor = SimpleNamespace(_update_stats_from_output=lambda *_: None)
    bare = processor._update_stats_from_output
    times.listen(SimpleNamespace(output_processor=processor))  # type: ignore[arg-type]
    state = SimpleNamespace(external_req_id="x")

    def step(_: int) -> None:
        for _ in range(engine_steps):
            activity.step(time.monotonic(), EngineLoad(0.5, size.batch, 0))
            for _ in range(size.batch):
                processor._update_stats_from_output(state, silent, 0.0, None)

    def without(_: int) -> None:
        for _ in range(engine_steps):
            for _ in range(size.batch):
                bare(state, silent, 0.0, None)

    with recording(directory, replica_process(0)):
        seconds = cpu_per_step(step, steps) - cpu_per_step(without, steps)
    return seconds, {"engine_steps": engine_steps, "requests": size.batch}


def of_loops(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The times and events of `of_controller`, of loops of `LOOP_TURNS` turns."""
    return of_controller(replace(size, turns=LOOP_TURNS), steps, directory)


ROWS = {
    "events of trainer rank 0": of_rank,
    "metrics and sinks of trainer rank 0": of_sinks,
    "monitor of trainer rank 0": of_monitor,
    "Prometheus of trainer rank 0": of_prometheus,
    "MLflow of trainer rank 0": of_mlflow,
    "W&B (offline) of trainer rank 0": of_wandb,
    "entropy in the update of trainer rank 0": of_entropy,
    "trajectories in the controller": of_controller,
    LOOPS: of_loops,
    "steps of an engine in its replica": of_replica,
}


def measure(size: StepSize, steps: int, repeats: int) -> list[Ratio]:
    """Return the rows of the report: of each the median over `repeats`."""
    rows, cpu_s = [], {}
    for name, of in ROWS.items():
        with tempfile.TemporaryDirectory() as directory:
            found = [of(size, steps, Path(directory) / str(number)) for number in range(repeats)]
        seconds = cpu_s[name] = statistics.median(each[0] for each in found)
        details = {"cpu_ms_per_step": round(seconds * 1000, 3), "step_s": round(size.seconds, 3), **found[0][1]}
        rows.append(Ratio(name, seconds / size.seconds, BOUND, details=details))
    rank = sum(row.ratio for row in rows if "rank 0" in row.name)
    job = cpu_of_job(size, {name: seconds for name, seconds in cpu_s.items() if name != LOOPS})
    details = {
        "cpu_ms_per_step": round(job * 1000, 3), "step_cpu_s": round(size.cpu_seconds, 3), "ranks": size.ranks,
        "replicas": size.replicas,
    }  # fmt: skip
    return [
        *rows,
        Ratio("all of trainer rank 0", rank, BOUND),
        Ratio("all processes, of their processor time", job / size.cpu_seconds, BOUND, details=details),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="take step time and numbers from this run directory")
    parser.add_argument("--step-seconds", type=float, default=StepSize.seconds, help="wall time of a step")
    parser.add_argument(
        "--step-cpu-seconds", type=float, default=StepSize.cpu_seconds, help="processor time of a step, all processes"
    )
    parser.add_argument("--watch", type=int, default=5, help="steps of a living run whose processor time is measured")
    parser.add_argument("--trajectories", type=int, default=StepSize.trajectories, help="per step")
    parser.add_argument("--steps", type=int, default=100, help="measured per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    add_options(parser)
    options = parser.parse_args()
    size = StepSize(options.step_seconds, options.step_cpu_seconds, trajectories=options.trajectories)
    steps, repeats = (2, 1) if options.quick else (options.steps, options.repeats)
    try:
        if options.run is not None:
            watched = cpu_of_step(options.run, options.watch, WATCH_TIMEOUT_S)
            size = of_run(options.run, replace(size, cpu_seconds=watched or size.cpu_seconds))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"observability: {error}\n")
        return 2
    return finish(measure(size, steps, repeats), options)


if __name__ == "__main__":
    sys.exit(main())
