"""The stand-ins of benchmarks/control_plane.py: replicas that answer after a time, and a trainer that only takes."""

from __future__ import annotations

import asyncio
import cProfile
import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.common.garbage import collect_rarely, exempt_present_objects
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.controller import RolloutController
from megarl.rollout.placement import ENGINE_RESOURCE, ROLLOUT_RESOURCE
from megarl.rollout.replica import ReplicaSpec, replica_name
from megarl.rollout.requests import GenerateRequest
from megarl.rollout.response_parts import EngineReport, ResponsePart
from megarl.rollout.shared_calls import CallDesk, CallResults, SharedCall

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
        self._desk = CallDesk(lambda method, args: getattr(self, method)(*args))
        exempt_present_objects()  # as the replica does
        collect_rarely()

    async def begin_calls(self, link: str, calls: Sequence[SharedCall]) -> None:
        self._desk.begin(link, calls)

    async def take_answers(self, link: str, seen: int, wait_s: float) -> CallResults:
        return await self._desk.take(link, seen, wait_s)

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
        return EngineReport({name: self._part(name, known) for name, known in reported.items()})

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
        """Tell that the actor is up."""


class ProfiledController(RolloutController):
    """The controller, with the profile of its event loop's thread written at the end."""

    def __init__(self, spec: ReplicaSpec, partition: str, *, cwd: str, profile: str) -> None:
        super().__init__(spec, partition, cwd=cwd)
        self._file, self._profile = profile, cProfile.Profile()

    async def start(self) -> dict[str, float]:
        result = await super().start()
        self._profile.enable()
        return result

    async def shutdown(self) -> None:
        self._profile.disable()
        self._profile.dump_stats(self._file)
        await super().shutdown()


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
        profile: str | None,
        *,
        replica_kind: type[TimedReplica] = TimedReplica,
        controller_kind: type[RolloutController] = RolloutController,
    ) -> ActorPool:
        """Start the stand-ins and the real controller, which starts the real queue and the reward processes.

        With a `profile` the controller is a ProfiledController.
        """
        import ray

        shared: dict[str, Any] = {"namespace": spec.namespace, "num_cpus": 1, "max_concurrency": CALLS_AT_ONCE}
        engines = [
            ray.remote(replica_kind)
            .options(name=replica_name(index), resources={ENGINE_RESOURCE: 1}, **shared)
            .remote(index, seconds_per_token, responses)
            for index in range(replicas)
        ]
        ray.get([each.ready.remote() for each in engines], timeout=CALL_TIMEOUT_S)
        more = {} if profile is None else {"profile": profile}
        controller = (
            ray.remote(controller_kind if profile is None else ProfiledController)
            .options(name="controller", resources={ROLLOUT_RESOURCE: 1}, **shared)
            .remote(spec, partition, cwd=cwd, **more)
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
