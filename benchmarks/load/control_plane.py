"""The load that the control plane can carry: controller, rewards and queue with stand-ins for engines and trainer.

    python -m benchmarks.load.control_plane [--json FILE] [--quick]

Real: the controller with admission, prompts, routing and batching of requests, the reward processes with the `math`
reward, the queue, Ray, and the way of every token between the processes. Stand-ins with the same interfaces: replicas
that answer after the time of their tokens, and a trainer that takes each batch, fetches its rows, commits it and
publishes the next version. Groups have 16 samples of 256 to 500 tokens.

The number of trajectories in flight is held by admission, three steps above the number asked for, which is rounded up
to whole steps. The replicas' speed is such that `--rate` trajectories per second would finish, with so many in flight,
if nothing else took time. So the load is the same for every number in flight. Rows:

- rate: finished trajectories per second, with most in flight / 1,000;
- in flight: trajectories in flight, median over the steps / the number asked for, the smaller of the two ratios;
- cost: CPU time of controller, rewards, queue and Ray's own processes per trajectory, most / fewest in flight;
- memory: private memory of controller, rewards and queue, last fifth of the trajectories / second fifth.

It takes about five minutes, with --quick one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from benchmarks.lib.report import ROOT, Ratio, finish, new_parser
from benchmarks.load.stand_ins import LONGEST, ActorPool, Response, TakenBatch, TakingTrainer, TimedReplica
from megarl.config.schema import Config
from megarl.rollout.orchestrator.controller import RolloutController

if TYPE_CHECKING:
    from megarl.cluster.pool.ray_head import RayHead

_Result = TypeVar("_Result")
SAMPLES_PER_GROUP = 16
RATE = 1000.0  # trajectories per second
COST = 1.3
MEMORY = 1.05
REPLICAS = 2
MEASUREMENTS = 25  # of memory, over the run
# Beginnings of command lines -> part. The trainer's stand-in is this process.
PARTS = {
    "ray::RolloutController": "controller",
    "ray::WatchedController": "controller",
    "ray::WatchedWorker": "workers",
    "ray::TransferQueueController": "queue",
    "ray::SimpleStorageUnit": "queue",
    "ray::TimedReplica": "stand-ins",
    "ray::TurnReplica": "stand-ins",
}
CONTROL_PLANE = ("controller", "workers", "rewards", "queue", "ray")  # the parts that the cost counts
KEPT = ("controller", "rewards", "queue")  # the parts whose memory counts


def part_of(command: Sequence[str]) -> str:
    """Return the part that a process with this command line belongs to."""
    for beginning, part in PARTS.items():
        if command and command[0].startswith(beginning):
            return part
    return "rewards" if "megarl.rewards.worker" in command else "ray"


def processes() -> dict[str, list[psutil.Process]]:
    """Return the processes below this one by part."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found.setdefault(part_of(process.cmdline()), []).append(process)
        except psutil.Error:
            continue
    return found


def cpu_seconds(parts: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Return the CPU time that each part has used so far; `trainer` is this process."""
    used = {}
    for part, members in {**parts, "trainer": [psutil.Process()]}.items():
        times = [process.cpu_times() for process in members]
        used[part] = sum(each.user + each.system for each in times)
    return used


def private_mib(parts: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Return the private memory of each part that counts, in MiB."""
    return {part: sum(each.memory_full_info().uss for each in parts[part]) / 2**20 for part in KEPT}


@dataclass(frozen=True)
class Measured:
    """One measurement: what finished per second, and what it cost."""

    wanted: int  # trajectories in flight
    in_flight: float  # median over the steps
    rate: float  # finished trajectories per second
    cost_ms: dict[str, float]  # CPU time per trajectory by part
    memory_mib: list[dict[str, float]]  # by part, evenly spread over the run

    @property
    def cost(self) -> float:
        """CPU milliseconds of the control plane per trajectory."""
        return sum(self.cost_ms.get(part, 0.0) for part in CONTROL_PLANE)

    @property
    def growth(self) -> float:
        """The memory of the last fifth over that of the second fifth."""
        totals = [sum(each.values()) for each in self.memory_mib]
        fifth = max(1, len(totals) // 5)
        return statistics.median(totals[-fifth:]) / statistics.median(totals[fifth : 2 * fifth])


class Meter:
    """Collects what `Measured` needs while the trainer runs. The first `warm_up` trajectories do not count."""

    def __init__(self, warm_up: int, trajectories: int) -> None:
        self._warm_up, self._total = warm_up, trajectories
        self._first: TakenBatch | None = None
        self._last: TakenBatch | None = None
        self._parts: dict[str, list[psutil.Process]] = {}
        self._cpu: dict[str, float] = {}
        self._in_flight: list[int] = []
        self._memory: list[dict[str, float]] = []

    def see(self, step: TakenBatch) -> None:
        """Record one step of the trainer."""
        if step.finished < self._warm_up:
            return
        if self._first is None:
            self._first, self._parts = step, processes()
            self._cpu = cpu_seconds(self._parts)
            return
        self._last = step
        self._in_flight.append(step.in_flight * SAMPLES_PER_GROUP)
        done = (step.finished - self._warm_up) / self._total
        if done * MEASUREMENTS > len(self._memory):
            self._memory.append(private_mib(self._parts))

    def result(self, wanted: int) -> Measured:
        """Return the measurement. Raises ValueError if no step came after the warm-up."""
        if self._first is None or self._last is None:
            raise ValueError(f"no step after the first {self._warm_up} trajectories: ask for more")
        finished = self._last.finished - self._first.finished
        used = {part: seconds - self._cpu[part] for part, seconds in cpu_seconds(self._parts).items()}
        return Measured(
            wanted,
            statistics.median(self._in_flight),
            finished / (self._last.seconds - self._first.seconds),
            {part: 1000 * seconds / finished for part, seconds in used.items()},
            self._memory,
        )


def config_of(options: argparse.Namespace, directory: Path, in_flight: int) -> dict[str, Any]:
    """Return the config of a run that keeps at least `in_flight` trajectories in flight."""
    return {
        "run": {"dir": str(directory / f"run-{in_flight}"), "steps": 10**9},
        "model": {"path": str(directory / "assets" / "model")},
        "batch": {"groups": options.groups, "samples_per_group": SAMPLES_PER_GROUP},
        "sampling": {"max_tokens": LONGEST},
        "data": {"path": str(directory / "assets" / "train.jsonl")},
        "reward": {"function": "math", "workers": options.reward_workers},
        "rollout": {"replicas": REPLICAS, "max_model_len": 2 * LONGEST},
        "admission": {"mode": "async", "sync_interval": 1, "max_staleness": steps_ahead(options, in_flight) - 1},
    }


def steps_ahead(options: argparse.Namespace, in_flight: int) -> int:
    """Return the steps whose trajectories admission allows at once.

    Three more than asked for: one that is taken, and two that may be ready.
    """
    return -(-in_flight // (options.groups * SAMPLES_PER_GROUP)) + 3


def responses(directory: Path) -> list[Response]:
    """Return responses that the reward has to read: steps of worked solutions, over and over, and a final answer."""
    from megarl.chat.tokenize import load_tokenizer

    tokenizer = load_tokenizer(directory / "assets" / "model")
    found = []
    lines = (directory / "assets" / "warm_start.jsonl").read_text(encoding="utf-8").splitlines()[:64]
    for line in lines:
        steps, _, answer = json.loads(line)["solution"].partition("\\boxed")
        body, end = tokenizer([steps, "\\boxed" + answer], add_special_tokens=False)["input_ids"]
        found.append(Response(body * (LONGEST // len(body) + 1), end))
    return found


@contextmanager
def running_pool(
    config: Config, name: str, seconds_per_token: float, responses: list[Response], seconds_per_batch: float = 0.0,
    replica: type[TimedReplica] = TimedReplica, controller: type[RolloutController] = RolloutController,
) -> Iterator[TakingTrainer]:  # fmt: skip
    """Run the real controller, queue and rewards of a config over stand-ins; yield that of the trainer."""
    from megarl.queue.transfer import QueueReader
    from megarl.rollout.engine.replica import ReplicaSpec

    config.run_dir.joinpath("logs").mkdir(parents=True)
    spec = ReplicaSpec(
        config.model_dump_json(), str(config.run_dir), name, cuda=False, max_model_len=None, supervisor=None
    )
    pool = ActorPool.start(
        spec, name, REPLICAS, seconds_per_token, responses, str(ROOT), replica_kind=replica, controller_kind=controller
    )
    reader = QueueReader.attach(name, namespace=name, timeout_s=60.0)
    try:
        yield TakingTrainer(pool, reader, seconds_per_batch)
    finally:
        reader.close()
        pool.stop()


def measure(options: argparse.Namespace, directory: Path, in_flight: int, trajectories: int) -> Measured:
    """Run one pool until `trajectories` have finished after the warm-up."""
    config = Config.model_validate(config_of(options, directory, in_flight))
    # An answer to a group takes as long as the longest of its 16 samples, nearly LONGEST tokens.
    allowed = steps_ahead(options, in_flight) * options.groups * SAMPLES_PER_GROUP
    seconds_per_token = allowed / options.rate / LONGEST
    warm_up = in_flight + 2 * options.groups * SAMPLES_PER_GROUP
    meter = Meter(warm_up, trajectories)
    with running_pool(config, f"in-flight-{in_flight}", seconds_per_token, responses(directory)) as trainer:
        trainer.run(warm_up + trajectories, meter.see)
        result = meter.result(in_flight)
    print(f"{in_flight} in flight: {result.rate:.0f} finished per second, {result.cost:.2f} ms of CPU time each")
    return result


def load_rows(results: Sequence[Measured], rate: float) -> list[Ratio]:
    """Return the rows of a load: rate, number in flight, cost; `results` in ascending order of the number in flight."""
    fewest, most = results[0], results[-1]

    def by_part(result: Measured) -> str:
        return ", ".join(f"{part} {value:.3f}" for part, value in sorted(result.cost_ms.items()))

    costs = {f"ms per trajectory, {each.wanted} in flight": by_part(each) for each in results}
    rates: dict[str, Any] = {f"finished per second, {each.wanted} in flight": round(each.rate) for each in results}
    numbers = {f"in flight, of {each.wanted}": round(each.in_flight) for each in results}
    rates["machine"] = f"{len(os.sched_getaffinity(0))} cores"
    least = min(each.in_flight / each.wanted for each in results)
    name = f"rate, {most.wanted} in flight / {rate:.0f} per second"
    return [
        Ratio(name, most.rate / rate, 1.0, True, rates),
        Ratio("in flight / the number asked for", least, 1.0, True, numbers),
        Ratio(f"cost, {most.wanted} / {fewest.wanted} in flight", most.cost / fewest.cost, COST, details=costs),
    ]


def rows_of(results: Sequence[Measured]) -> list[Ratio]:
    """Return the rows of the report; `results` in ascending order of the number in flight."""
    most = results[-1]
    memory: dict[str, Any] = {"trajectories measured": f"{len(most.memory_mib)} times over the run"}
    if most.memory_mib:
        ends = (most.memory_mib[0], most.memory_mib[-1])
        first, last = (", ".join(f"{part} {value:.0f}" for part, value in each.items()) for each in ends)
        memory |= {"MiB at the start": first, "MiB at the end": last}
    return [*load_rows(results, RATE), Ratio("memory, last fifth / second fifth", most.growth, MEMORY, details=memory)]


def start_ray(directory: Path) -> RayHead:
    """Start a Ray cluster as a run's supervisor does; return its head."""
    from megarl.cluster.pool.ray_head import RayHead, RayShare, access_environment
    from megarl.rollout.engine.placement import ENGINE_RESOURCE, ROLLOUT_RESOURCE

    directory.mkdir()
    os.environ.update(access_environment(directory, create=True))
    share = RayShare(REPLICAS + 5, 0, {ROLLOUT_RESOURCE: 10000, ENGINE_RESOURCE: REPLICAS})
    head = RayHead(share, "control-plane", directory, 120.0)
    head.start()
    return head


def measure_each(
    options: argparse.Namespace,
    make_assets: Callable[[Path], object],
    measure: Callable[[argparse.Namespace, Path, int, int], _Result],
) -> list[_Result]:
    """Return a measurement for each number in flight, all on one Ray cluster."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    os.environ |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        directory = Path(name)
        make_assets(directory / "assets")
        head = start_ray(directory / "ray")
        try:
            sizes = [options.fewer] * (len(options.in_flight) - 1) + [options.trajectories]
            pairs = zip(options.in_flight, sizes, strict=True)
            return [measure(options, directory, number, size) for number, size in pairs]
        finally:
            import ray

            ray.shutdown()
            head.stop()


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1000, 10_000], help="trajectories, ascending")
    parser.add_argument("--trajectories", type=int, default=100_000, help="finished ones measured with most in flight")
    parser.add_argument("--fewer", type=int, default=20_000, help="finished ones measured with fewer in flight")
    parser.add_argument("--rate", type=float, default=1250.0, help="trajectories per second that the replicas offer")
    parser.add_argument("--groups", type=int, default=25, help="groups per step")
    parser.add_argument("--reward-workers", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.in_flight, options.trajectories, options.fewer, options.rate = [128, 256], 800, 400, 400.0
        options.groups = 4
    from examples.quickstart.build import build_assets
    from examples.quickstart.warm_start import WarmStart

    # Only tokenizer and data matter.
    return finish(rows_of(measure_each(options, partial(build_assets, size=WarmStart(steps=1)), measure)), options)


if __name__ == "__main__":
    sys.exit(main())
