"""The stand-ins of the load benchmarks: replicas that answer after a time, a tool, a trainer that only takes batches.

Event loops of the real controller and workers are watched here too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megarl.common.process.memory_tuning import collect_rarely, exempt_present_objects
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.placement import ENGINE_RESOURCE, ROLLOUT_RESOURCE
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.replica_start import replica_name
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from megarl.rollout.orchestrator.controller import RolloutController
from megarl.rollout.transport.link import Parcel
from megarl.rollout.transport.rpc import Call, Reply, RpcServer
from megarl.rollout.workers.agent_worker import AgentWorker
from megarl.tools.tool import ToolAnswer

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from megarl.queue.transfer import QueueReader

SHORTEST, LONGEST = 256, 500
CALL_TIMEOUT_S = 300.0
CALLS_AT_ONCE = 20_000  # of one actor: each second turn of an agent is a call of its own


@dataclass(frozen=True)
class Response:
    """Token ids of a text: the beginning of `body`, at least LONGEST tokens long, then `end`."""

    body: list[int]
    end: list[int]

    def of_length(self, tokens: int) -> list[int]:
        return self.body[: tokens - len(self.end)] + self.end


@dataclass(frozen=True)
class _Open:
    """A response that a stand-in works on."""

    ids: list[int]
    version: int
    started: float


class TimedReplica:
    """Has the methods of `EngineReplica` that the controller and a publication call. Its answers take the time of their
    tokens, and do not depend on how many there are.
    """

    def __init__(self, index: int, seconds_per_token: float, responses: list[Response]) -> None:
        self._index, self._seconds_per_token = index, seconds_per_token
        self._responses = responses
        self._logprobs = [-random.Random(index).random() for _ in range(LONGEST)]
        self._rng = random.Random(index)
        self._version = 0
        self._open: dict[str, _Open] = {}
        self._calls = RpcServer(lambda method, args: getattr(self, method)(*args)).link
        exempt_present_objects()  # as the replica does
        collect_rarely()

    async def give(self, number: int, calls: Sequence[Call], link: str) -> None:
        await self._calls.give(number, calls, link)

    async def take(self, seen: int, wait_s: float, link: str) -> Parcel[Reply]:
        return await self._calls.take(seen, wait_s, link)

    async def generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        """Start to work on requests, then `report` on them."""
        now = time.monotonic()
        for request in requests:
            self._open[request.request_id] = _Open(self._respond(request), self._version, now)
        return await self.report({request.request_id: 0 for request in requests}, wait_s)

    def _respond(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of the response, LONGEST at most."""
        return self._rng.choice(self._responses).of_length(self._rng.randint(SHORTEST, LONGEST))

    async def report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        """Return the new tokens: when all responses have taken their time, and after `wait_s` at the latest."""
        end = max(self._open[name].started + len(self._open[name].ids) * self._seconds_per_token for name in reported)
        await asyncio.sleep(max(0.0, min(wait_s, end - time.monotonic())))
        return {name: self._part(name, known) for name, known in reported.items()}, EngineLoad()

    def _part(self, name: str, known: int) -> ResponsePart:
        found = self._open[name]
        seconds = time.monotonic() - found.started
        made = min(len(found.ids), math.ceil(seconds / self._seconds_per_token))
        ended = made == len(found.ids)
        if ended:
            del self._open[name]
        spans = (VersionSpan(found.version, 0, made - known),) if made > known else ()
        return ResponsePart(
            found.ids[known:made], self._logprobs[known:made], spans, "stop" if ended else None, seconds
        )

    async def set_weight_version(self, version: str) -> None:
        self._version = int(version)

    async def reset(self) -> None:
        """Forget all requests."""
        self._open.clear()

    async def ready(self) -> None:
        """Answer that the actor is up."""


@dataclass
class ActorPool:
    """The actors of one measurement."""

    controller: ActorHandle
    replicas: list[ActorHandle]

    @classmethod
    def start(
        cls,
        spec: ReplicaSpec,
        partition: str,
        replicas: int,
        seconds_per_token: float,
        responses: list[Response],
        cwd: str,
        *,
        replica_kind: type[TimedReplica] = TimedReplica,
        controller_kind: type[RolloutController] = RolloutController,
    ) -> ActorPool:
        """Start the stand-ins and the real controller, which starts the real queue and the reward processes."""
        import ray

        shared: dict[str, Any] = {"namespace": spec.namespace, "num_cpus": 1, "max_concurrency": CALLS_AT_ONCE}
        engines = [
            ray.remote(replica_kind)
            .options(name=replica_name(index), resources={ENGINE_RESOURCE: 1}, **shared)
            .remote(index, seconds_per_token, responses)
            for index in range(replicas)
        ]
        ray.get([each.ready.remote() for each in engines], timeout=CALL_TIMEOUT_S)
        controller = (
            ray.remote(controller_kind)
            .options(name="controller", resources={ROLLOUT_RESOURCE: 1}, **shared)
            .remote(spec, partition, cwd=cwd)
        )
        ray.get(controller.start.remote(), timeout=CALL_TIMEOUT_S)
        return cls(controller, engines)

    def stop(self) -> None:
        import ray

        ray.get(self.controller.shutdown.remote(), timeout=CALL_TIMEOUT_S)
        for actor in [self.controller, *self.replicas]:
            ray.kill(actor)


@dataclass(frozen=True)
class TakenBatch:
    """The numbers that the trainer saw when it took a batch."""

    finished: int  # trajectories taken so far, this batch included
    in_flight: int  # groups
    seconds: float  # monotonic clock, after the commit


class TakingTrainer:
    """Makes the calls of the training loop: takes a batch, fetches its rows, commits it, publishes a version."""

    def __init__(self, pool: ActorPool, reader: QueueReader, seconds_per_batch: float = 0.0) -> None:
        """`seconds_per_batch`: the time that it takes for a batch at least, as if it trained on it."""
        self._pool, self._reader, self._seconds_per_batch = pool, reader, seconds_per_batch
        self._finished = 0

    def call(self, method: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401  # Ray does not know the type
        import ray

        return ray.get(getattr(self._pool.controller, method).remote(*args, **kwargs), timeout=CALL_TIMEOUT_S)

    def publish(self, version: int) -> None:
        import ray

        self.call("announce", version)
        calls = [replica.set_weight_version.remote(str(version)) for replica in self._pool.replicas]
        ray.get(calls, timeout=CALL_TIMEOUT_S)
        self.call("set_version", version, True)

    def run(self, trajectories: int, seen: Callable[[TakenBatch], None]) -> None:
        """Take batches until `trajectories` are committed; call `seen` after each. Raises RuntimeError if one is lost
        or has other rows than its tags say.
        """
        self.call("begin", None)
        self.publish(0)
        exempt_present_objects()  # as the trainer does
        step = 0
        while self._finished < trajectories:
            batch = self.call("wait_batch", step, CALL_TIMEOUT_S / 2)
            taken = time.monotonic()
            tags = self._reader.read_tags(batch.keys)
            rows = self._reader.fetch(batch.keys)
            if [(tag.key, tag.response_tokens) for tag in tags] != [(row.key, len(row.response_ids)) for row in rows]:
                raise RuntimeError(f"step {step}: tags and rows of the queue differ")
            if failed := [row for row in rows if row.status != "ok"]:
                raise RuntimeError(f"step {step}: {len(failed)} trajectories failed: {failed[0].failure}")
            time.sleep(max(0.0, taken + self._seconds_per_batch - time.monotonic()))
            groups = len({tag.group_id for tag in tags})
            counters = self.call("commit", step, trained=groups, filtered=0, dropped_stale=0, failed=0)
            self._finished += len(rows)
            step += 1
            self.publish(step)
            seen(TakenBatch(self._finished, counters.in_flight, time.monotonic()))
        gc.unfreeze()  # else extension modules complain at the end about what they have not got back
        if counters.trained != step * groups:
            raise RuntimeError(f"the controller counts {counters.trained} trained groups, the trainer {step * groups}")


SHORTEST_TURN, LONGEST_TURN = 128, 250  # tokens
TOOL_S = 0.05
TURNS = "turns"  # the folder of what the watches have seen, in the run directory
TICK_S = 0.01
LINE_S = 0.5


class TurnReplica(TimedReplica):
    """Answers the first request of a sample by a call of the tool, and the second one by a solution.

    `responses`: those of the first turn, then as many of the second one.
    """

    def __init__(self, index: int, seconds_per_token: float, responses: list[Response]) -> None:
        super().__init__(index, seconds_per_token, responses)
        half = len(responses) // 2
        self._turns, self._draws = (responses[:half], responses[half:]), random.Random(index)

    def _respond(self, request: GenerateRequest) -> list[int]:
        turn = int(request.request_id.rsplit("-", 1)[1].partition(".")[0])
        return self._draws.choice(self._turns[turn]).of_length(self._draws.randint(SHORTEST_TURN, LONGEST_TURN))


class Slow:
    """A tool that takes TOOL_S."""

    name = "slow"
    description = "Wait."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
    }
    idempotent = True

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Answer after a while."""
        await asyncio.sleep(TOOL_S)
        return ToolAnswer(f"the number is {arguments.get('number')}")

    async def close(self) -> None:
        """Nothing has to be closed."""


@dataclass(frozen=True)
class LongestTurn:
    """The longest turn of an event loop that ended before `at` (monotonic clock), since the one before it in the file.

    `wall_s`: how late a timer was that was due in it; `ready_s`: the part of it in which the loop's thread could run,
    but other threads and processes had the cores; `cpu_s`: the most that the thread has computed in any turn.
    """

    at: float
    wall_s: float
    cpu_s: float
    ready_s: float = 0.0


def seconds_ready() -> Callable[[], float]:
    """Return a function that gives the seconds for which this thread has waited for a core since it began.

    Source: the second number of /proc/thread-self/schedstat, in ns. Always 0 where the kernel has no such file.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except FileNotFoundError:
        return lambda: 0.0
    return lambda: int(os.pread(file, 100, 0).split()[1]) / 1e9


class LoopWatch:
    """Measures the turns of the present event loop, and writes the longest ones to RUN_DIR/turns/NAME.jsonl."""

    def __init__(self, run_dir: Path, name: str) -> None:
        folder = run_dir / TURNS
        folder.mkdir(exist_ok=True)
        self._path = folder / f"{name}.jsonl"
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        wall_s = cpu_s = ready_s = 0.0
        waited_s = seconds_ready()
        line_at = time.monotonic() + LINE_S
        while True:
            wall, cpu, ready = time.monotonic(), time.thread_time(), waited_s()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            late_s = now - wall - TICK_S
            if late_s > wall_s:
                wall_s, ready_s = late_s, min(late_s, waited_s() - ready)
            cpu_s = max(cpu_s, time.thread_time() - cpu)
            if now >= line_at:
                with self._path.open("a") as file:
                    file.write(json.dumps(vars(LongestTurn(now, wall_s, cpu_s, ready_s))) + "\n")
                wall_s, cpu_s, ready_s, line_at = 0.0, 0.0, 0.0, now + LINE_S


def longest_turns(run_dir: Path, begin: float, end: float, names: Iterable[str]) -> dict[str, LongestTurn]:
    """Return the longest turns of watched loops between two times (monotonic clock), by the name of the watch.

    Raises FileNotFoundError for a loop that nobody has watched. One that has written nothing between these times was
    blocked all the time.
    """
    return {name: _longest(_lines(run_dir / TURNS / f"{name}.jsonl"), begin, end) for name in names}


def _lines(path: Path) -> Iterable[LongestTurn]:
    return [LongestTurn(**json.loads(line)) for line in path.read_text().splitlines()]


def _longest(turns: Iterable[LongestTurn], begin: float, end: float) -> LongestTurn:
    within = [each for each in turns if begin <= each.at <= end]
    if not within:
        return LongestTurn(end, end - begin, 0.0)
    longest = max(within, key=lambda each: each.wall_s)
    return LongestTurn(end, longest.wall_s, max(each.cpu_s for each in within), longest.ready_s)


class WatchedWorker(AgentWorker):
    """An agent worker whose event loop is watched."""

    async def start(self) -> None:
        await super().start()
        self._watch = LoopWatch(self.run_dir, f"worker-{self.spec.index}")


class WatchedController(RolloutController):
    """The controller, with its event loop and those of its workers watched."""

    worker_kind = WatchedWorker

    async def start(self) -> dict[str, float]:
        result = await super().start()
        self._watch = LoopWatch(self.run_dir, "controller")
        return result
