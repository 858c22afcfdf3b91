"""The cost of seeing a run: the calls of one step that record it, in processor time.

    python -m benchmarks.observability [--json FILE] [--quick]

Makes the calls of many steps as the processes of a run make them, writes to real files, and counts processor time of
all threads, the writers' included: what the step would not take without them. The row is the sum over rank 0, the
controller and one replica, over the processor time of the same step in all of these processes: that of the
quickstart's task, asynchronous with one engine on two cores (docs/benchmarks.md). It takes about a minute.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from benchmarks.lib.report import Ratio, finish, new_parser
from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config
from megarl.rollout.agents.batch_stats import BatchStats
from megarl.rollout.agents.sample_times import SampleTimes
from megarl.rollout.engine.activity import ReplicaActivity
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateResult
from megarl.rollout.engine.request_times import RequestTimes
from megarl.telemetry.metrics.declarations import REGISTRY
from megarl.telemetry.sinks.sinks import MetricsWriter
from megarl.telemetry.trace import events
from megarl.telemetry.trace.lines import CONTROLLER, rank_process, replica_process

BOUND = 0.01
STEP_CPU_S = 1.4  # of a step, all processes together
TRAJECTORIES, REQUESTS, ENGINE_STEPS = 256, 64, 50  # of a step, of a step of the engine, and such steps in a step
PHASES = ("generate", "queue", "logprobs", "update", "drain", "sync", "save", "step")
CALLS = ("stage", "pause", "start", "update", "finish", "resume")
PAUSE_S = 0.01  # between two steps, in which the threads write; in a run they have a whole step for it


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
    events.open_events(config.telemetry.events_mib, directory, process)
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


def of_rank(steps: int, directory: Path) -> float:
    """The events of trainer rank 0 in one step: phases, mini-batches, one publication."""

    def step(number: int) -> None:
        now = time.monotonic()
        for phase in PHASES:
            events.record(phase, now, now + 0.1, step=number)
        events.record("mini_batch", now, now + 0.1, step=number, args={"samples": 9, "tokens": 999})
        for call in CALLS:
            events.record(f"sync_{call}", now, now + 0.1, version=number)
        events.record("publication", now, now + 0.1, version=number, args={"bytes": 10**9})

    with recording(directory, rank_process(0)):
        return cpu_per_step(step, steps)


def of_sinks(steps: int, directory: Path) -> float:
    """The metrics of one step as rank 0 writes them: metrics.jsonl, TensorBoard, the table, summary."""
    names = [metric.name for metric in REGISTRY if "{" not in metric.name and not metric.name.startswith("eval/")]
    values = dict.fromkeys(names, 1.000001)
    with recording(directory, "") as config, open(os.devnull, "w", encoding="utf-8") as terminal:
        writer = MetricsWriter.open(config, terminal)
        written = partial(writer.write, values=values)
        seconds = cpu_per_step(lambda number: written(number + 1), steps, writer.flush)
        writer.close()
    return seconds


def of_controller(steps: int, directory: Path) -> float:
    """The times of all trajectories of one step, their events and the slowest ones, where the loops run."""
    result = GenerateResult("x", [1] * 50, [0.0] * 50, (), "stop", 0, 1.0, queue_s=0.1, prefill_s=0.1)

    def step(number: int) -> None:
        stats = BatchStats()
        for trajectory in range(TRAJECTORIES):
            group, sample = number * TRAJECTORIES + trajectory // 16, trajectory % 16
            begin = time.monotonic()
            times = SampleTimes(begin)
            times.add_turn(result, 1.2)
            events.record(
                "turn", begin, begin + 1.2, group=group, sample=sample, replica=0, version=number,
                args={"turn": 0, "tokens": 50, "queue_s": 0.3, "prefill_s": 0.1, "decode_s": 0.8},
            )  # fmt: skip
            times.add("reward", 0.01)
            events.record("reward", begin, begin + 1.3, group=group, sample=sample, args={"error": 0})
            ended = times.end(group, sample, begin + 1.3, time.time())
            stats.note_times(ended)
            events.record("trajectory", begin, begin + 1.3, group=group, sample=sample, args=ended.args())

    with recording(directory, CONTROLLER):
        return cpu_per_step(step, steps)


def of_replica(steps: int, directory: Path) -> float:
    """The listeners to the engine during one step of the trainer, at each engine step and each output of it."""
    activity, times = ReplicaActivity(0), RequestTimes()
    silent = SimpleNamespace(events=None)
    processor = SimpleNamespace(_update_stats_from_output=lambda *_: None)
    bare = processor._update_stats_from_output
    times.listen(SimpleNamespace(output_processor=processor))  # type: ignore[arg-type]
    state = SimpleNamespace(external_req_id="x")

    def step(_: int) -> None:
        for _ in range(ENGINE_STEPS):
            activity.step(time.monotonic(), EngineLoad(0.5, REQUESTS, 0))
            for _ in range(REQUESTS):
                processor._update_stats_from_output(state, silent, 0.0, None)

    def without(_: int) -> None:
        for _ in range(ENGINE_STEPS):
            for _ in range(REQUESTS):
                bare(state, silent, 0.0, None)

    with recording(directory, replica_process(0)):
        return cpu_per_step(step, steps) - cpu_per_step(without, steps)


PARTS = {"rank 0: events": of_rank, "rank 0: metrics": of_sinks, "controller": of_controller, "replica": of_replica}


def row_of(seconds: Mapping[str, float]) -> Ratio:
    """Return the row of the report from the processor seconds of each part in a step."""
    details = {f"{name}, ms per step": round(1000 * each, 3) for name, each in seconds.items()}
    share = sum(seconds.values()) / STEP_CPU_S
    return Ratio("share of the processor time of a step, all processes", share, BOUND, details=details)


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="measured per repeat")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median counts")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.repeats = 2, 1
    seconds = {}
    for name, of in PARTS.items():
        with tempfile.TemporaryDirectory() as directory:
            found = [of(options.steps, Path(directory) / str(number)) for number in range(options.repeats)]
        seconds[name] = statistics.median(found)
    return finish([row_of(seconds)], options)


if __name__ == "__main__":
    sys.exit(main())
