#!/usr/bin/env python3
"""The cost of seeing a run: the calls of one step that record it, in processor time.

    python -m benchmarks.observability [--json FILE] [--quick] [--step-seconds S] [--step-cpu-seconds S]

Each row makes the calls of many steps as the process of a run makes them, writes to real files, and counts processor
time of all threads of this process, the writers' included: what the step would not take without them. The ratio is that
time per step over the step's wall time, so 0.01 is one hundredth of a core. It takes about a minute.

The last row adds the rows up over all processes of the run: rank 0, the events of the other ranks, the controller, and
each replica. Its ratio is that sum over the processor time of the same step in all of these processes, because wall
time says nothing of a sum over processes. Longer loops are in a row of their own, which the sum leaves out.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.lib.report import Ratio, finish, new_parser
from megarl.config.load import config_from_tree
from megarl.config.schema import Config
from megarl.rollout.batch_stats import BatchStats
from megarl.rollout.engine_load import EngineLoad
from megarl.rollout.replica_activity import ReplicaActivity
from megarl.rollout.request_times import RequestTimes
from megarl.rollout.requests import GenerateResult
from megarl.rollout.sample_times import SampleTimes
from megarl.telemetry import events
from megarl.telemetry.declarations import REGISTRY
from megarl.telemetry.event_lines import CONTROLLER, rank_process, replica_process
from megarl.telemetry.sinks import MetricsWriter

BOUND = 0.01
LOOP_TURNS = 8
RANK, REPLICA = "events of trainer rank 0", "steps of an engine in its replica"
LOOPS = f"trajectories of {LOOP_TURNS} turns in the controller"
PHASES = ("generate", "queue", "logprobs", "update", "drain", "sync", "save", "step")
CALLS = ("stage", "pause", "start", "update", "finish", "resume")
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
    trajectories: int = 256
    turns: int = 1
    mini_batches: int = 1
    engine_step_s: float = 0.02
    batch: int = 64  # requests of an engine step


@contextmanager
def recording(directory: Path, process: str) -> Iterator[Config]:
    """Record the events of this process as one of the run, in `directory`; or nothing, without a process."""
    directory.mkdir(exist_ok=True)
    tree = {
        "run": {"steps": 10**6, "dir": str(directory)}, "model": {"path": "model"}, "data": {"path": "data"},
        "batch": {"groups": 16, "samples_per_group": 16}, "sampling": {"max_tokens": 512},
        "telemetry": {"events_mib": 24.0 if process else 0.0},
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


def of_rank(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The events of trainer rank 0 in one step: phases, mini-batches, one publication."""

    def step(number: int) -> None:
        now = time.monotonic()
        for phase in PHASES:
            events.record(phase, now, now + 0.1, step=number)
        for _ in range(size.mini_batches):
            events.record("mini_batch", now, now + 0.1, step=number, args={"samples": 9, "tokens": 999})
        for call in CALLS:
            events.record(f"sync_{call}", now, now + 0.1, version=number)
        events.record("publication", now, now + 0.1, version=number, args={"bytes": 10**9})

    with recording(directory, rank_process(0)):
        seconds = cpu_per_step(step, steps)
    return seconds, {"events": len(PHASES) + size.mini_batches + len(CALLS) + 1}


def of_sinks(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The metrics of one step as rank 0 writes them: metrics.jsonl, TensorBoard, the table, summary."""
    names = [metric.name for metric in REGISTRY if "{" not in metric.name and not metric.name.startswith("eval/")]
    values = dict.fromkeys(names, 1.000001)
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
                events.record(
                    "turn", begin, begin + 1.2, group=group, sample=sample, replica=0, version=number,
                    args={"turn": turn, "tokens": 50, "queue_s": 0.3, "prefill_s": 0.1, "decode_s": 0.8},
                )  # fmt: skip
            times.add("reward", 0.01)
            events.record("reward", begin, begin + 1.3, group=group, sample=sample, args={"error": 0})
            ended = times.end(group, sample, begin + 1.3, time.time())
            stats.note_times(ended)
            events.record("trajectory", begin, begin + 1.3, group=group, sample=sample, args=ended.args())

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
    RANK: of_rank,
    "metrics and sinks of trainer rank 0": of_sinks,
    "trajectories in the controller": of_controller,
    LOOPS: of_loops,
    REPLICA: of_replica,
}


def cpu_of_job(size: StepSize, seconds: Mapping[str, float]) -> float:
    """Return the processor seconds of observability in one step, of all processes. `seconds`: of each row."""
    once = sum(value for name, value in seconds.items() if name != REPLICA)
    return once + (size.ranks - 1) * seconds[RANK] + size.replicas * seconds[REPLICA]


def measure(size: StepSize, steps: int, repeats: int) -> list[Ratio]:
    """Return the rows of the report: of each the median over `repeats`."""
    seconds, details = {}, {}
    for name, of in ROWS.items():
        with tempfile.TemporaryDirectory() as directory:
            found = [of(size, steps, Path(directory) / str(number)) for number in range(repeats)]
        seconds[name], details[name] = statistics.median(each[0] for each in found), found[0][1]
    return rows_of(size, seconds, details)


def rows_of(size: StepSize, seconds: Mapping[str, float], details: Mapping[str, dict[str, Any]]) -> list[Ratio]:
    """Return the rows of the report from the processor seconds of each row in a step."""
    rows = []
    for name, cpu_s in seconds.items():
        facts = {"cpu_ms_per_step": round(cpu_s * 1000, 3), "step_s": round(size.seconds, 3), **details.get(name, {})}
        rows.append(Ratio(name, cpu_s / size.seconds, BOUND, details=facts))
    rank = sum(row.ratio for row in rows if "rank 0" in row.name)
    job = cpu_of_job(size, {name: cpu_s for name, cpu_s in seconds.items() if name != LOOPS})
    facts = {
        "cpu_ms_per_step": round(job * 1000, 3), "step_cpu_s": round(size.cpu_seconds, 3), "ranks": size.ranks,
        "replicas": size.replicas,
    }  # fmt: skip
    return [
        *rows,
        Ratio("all of trainer rank 0", rank, BOUND),
        Ratio("all processes, of their processor time", job / size.cpu_seconds, BOUND, details=facts),
    ]


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--step-seconds", type=float, default=StepSize.seconds, help="wall time of a step")
    parser.add_argument(
        "--step-cpu-seconds", type=float, default=StepSize.cpu_seconds, help="processor time of a step, all processes"
    )
    parser.add_argument("--trajectories", type=int, default=StepSize.trajectories, help="per step")
    parser.add_argument("--steps", type=int, default=100, help="measured per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    size = StepSize(options.step_seconds, options.step_cpu_seconds, trajectories=options.trajectories)
    steps, repeats = (2, 1) if options.quick else (options.steps, options.repeats)
    return finish(measure(size, steps, repeats), options)


if __name__ == "__main__":
    sys.exit(main())
