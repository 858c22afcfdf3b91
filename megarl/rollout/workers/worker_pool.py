"""Distributes loops over agent workers, and moves them when a worker is lost.

Every job belongs to exactly one worker, or waits for one. The controller keeps the requests, tokens and records of its
loops (`RemoteRun`), so they continue in another worker if theirs is lost. Later messages of a lost worker belong to a
run that is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.common.errors import LostWithWorkers, NoWorkerLeft
from megarl.common.rundir.notices import write_notice
from megarl.config.schema import TimeoutsConfig
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.loop_host import EvaluatedResponse
from megarl.rollout.agents.loop_run import LoopRun
from megarl.rollout.engine.messages import GenerateResult
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import RequestPlace
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.link import LinkClient, LinkLost
from megarl.rollout.workers.agent_worker import AgentWorker, WorkerSpec, start_worker
from megarl.rollout.workers.messages import (
    Drop,
    Frozen,
    LoopAnswer,
    LoopRequest,
    Persist,
    SentFailure,
    Start,
    ToController,
    ToWorker,
)
from megarl.telemetry.trace import events

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

MOST_LOST = 5  # workers lost with one job, which may be what kills them
START_ATTEMPTS = 3  # to replace a lost worker
RETRY_S = 5.0
SLICE = 32  # messages handled at once, each of which may start a call to an engine


@dataclass(frozen=True)
class _Request:
    prompt: str  # its digest
    response: asyncio.Task[GenerateResult]


class RemoteRun:
    """A run whose loops are in workers, from the first worker to the last.

    Nothing is lost when a worker dies. Open requests continue, and the next worker gets their responses when it asks
    for them. `ended`: the result of the loops, or the error they raised in the worker.
    """

    def __init__(self, run: LoopRun) -> None:
        self.run, self.progress = run, run.progress
        self.number = -1  # of the current worker's run; -1 without a worker
        self.worker: int | None = None
        self.lost_workers = 0
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests: dict[RequestPlace, _Request] = {}
        self._renamed = 0

    @property
    def is_group(self) -> bool:
        """False for a response of an evaluation."""
        return self.run.job.evaluated is None

    def assign(self, worker: int, number: int) -> Start:
        """Give the loops to a worker; return the message from which it continues."""
        self.worker, self.number = worker, number
        begun, deadline = self.progress.begun(), self.run.deadline
        # It must know the turns that have ended. It asks for the others, and gets their tokens when they end.
        ended = {place: each for place, each in begun.responses.items() if each.tokens.finish_reason is not None}
        sent = None if deadline is None else deadline.sent(time.monotonic())
        job = replace(self.run.job, prompt=self.run.job.prompt.without_files())
        return Start(number, job, replace(begun, responses=ended), sent)

    def take_away(self) -> None:
        """Record that the worker is lost."""
        self.worker, self.number = None, -1
        self.lost_workers += 1

    def freeze(self, message: Frozen) -> None:
        """Keep the records of a loop."""
        before = self.progress.loops.get(message.sample)
        if before is None or message.loop.version > before.version:
            self.progress.record(message.sample, message.loop)

    def ask(self, message: LoopRequest, send: Callable[[ToWorker], None]) -> None:
        """Have engines answer a request, unless an earlier worker has asked for it: then use that answer."""
        found = self._requests.get(message.place)
        if found is None or found.prompt != message.prompt:
            begun = asyncio.get_running_loop().create_task(self._respond(message, again=found is not None))
            found = self._requests[message.place] = _Request(message.prompt, begun)
        found.response.add_done_callback(partial(self._answer, message, send))

    async def _respond(self, message: LoopRequest, *, again: bool) -> GenerateResult:
        request = message.request
        if again:  # an engine may still work on the earlier request, which had another prompt
            self._renamed += 1
            request = replace(request, request_id=f"{request.request_id}.{self._renamed}")
        self.progress.begin(request, message.place, message.prompt)
        result = await self.run.generate(request, message.place, message.near)
        # Requests of evaluations share calls, which keep no tokens; the next worker needs the turns that have ended.
        part = ResponsePart(
            result.response_ids, result.logprobs, result.versions, result.finish_reason, routes=result.routes
        )
        self.progress.tokens.setdefault(request.request_id, part)
        return result

    def _answer(
        self, message: LoopRequest, send: Callable[[ToWorker], None], response: asyncio.Task[GenerateResult]
    ) -> None:
        if response.cancelled():
            return
        error = response.exception()
        if message.run != self.number:
            return
        failure = None if error is None else SentFailure.of(error)
        send(LoopAnswer(message.run, message.place, None if failure is not None else response.result(), failure))

    def close(self) -> None:
        """Cancel everything that is open."""
        for each in self._requests.values():
            each.response.cancel()
        if not self.ended.done():
            self.ended.cancel()
        elif not self.ended.cancelled():
            self.ended.exception()  # nobody else retrieves it


class WorkerPool:
    """Runs loops in workers, with the interface of `LoopHost`; replaces lost workers."""

    def __init__(
        self,
        workers: int,
        timeouts: TimeoutsConfig,
        *,
        start: Callable[[int], Awaitable[Any]],
        end: Callable[[Any], object],
        notify: Callable[[str], object],
    ) -> None:
        """`start(index)`: creates and starts a worker. `end`: kills one. `notify`: warns the user."""
        self._count, self._timeouts = workers, timeouts
        self._start, self._end, self._notify = start, end, notify
        self._clients: dict[int, LinkClient[ToWorker]] = {}
        self._runs: dict[int, RemoteRun] = {}
        self._loops: Counter[int | None] = Counter()  # by worker
        self._without_worker: deque[RemoteRun] = deque()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[int] = set()
        self._closed = False
        self.lost = self.redone = 0  # lost workers, and groups moved to others, since the last `take_metrics`

    async def start(self) -> None:
        """Start all workers. Raises what the first one that does not start raises."""
        actors = await asyncio.gather(*(self._start(index) for index in range(self._count)))
        for index, actor in enumerate(actors):
            self._open(index, actor)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of workers since the last call."""
        lost, redone, self.lost, self.redone = self.lost, self.redone, 0, 0
        return {
            "rollout/workers_alive": len(self._clients),
            "rollout/workers_lost": lost,
            "rollout/groups_redone": redone,
        }

    def waiting(self) -> str:
        """Return what the workers work on, as the end of a sentence."""
        parts = []
        for index, client in self._clients.items():
            runs = [run for run in self._runs.values() if run.worker == index]
            groups = sum(run.is_group for run in runs)
            evaluated = f" and {len(runs) - groups} responses of an evaluation" if len(runs) > groups else ""
            parts.append(f"; agent worker {index} has {groups} groups{evaluated}{client.waiting}")
        if self._without_worker:
            parts.append(f"; {len(self._without_worker)} of these wait for an agent worker")
        return "".join(parts)

    async def run_group(self, run: LoopRun) -> list[Trajectory]:
        """See `LoopHost.run_group`. The loops continue in another worker if theirs is lost.

        Raises what a loop raised, LostWithWorkers if several workers were lost with the group, NoWorkerLeft if there is
        no worker and none is coming.
        """
        rows: list[Trajectory] = await self._run(run)
        return rows

    async def respond(self, run: LoopRun) -> EvaluatedResponse:
        """See `LoopHost.respond`. Raises as `run_group`."""
        ended: EvaluatedResponse = await self._run(run)
        return ended

    async def _run(self, run: LoopRun) -> Any:  # noqa: ANN401  # what a LoopHost returns for the job
        remote = RemoteRun(run)
        try:
            self._assign(remote)
            return await remote.ended
        finally:
            if (client := self._client_of(remote)) is not None and remote.number in self._runs:
                client.send(Drop(remote.number))
            self._release(remote)

    async def drop_all(self) -> None:
        """Have all workers end and forget their loops."""
        for remote in list(self._runs.values()):
            self._release(remote)
        self._without_worker.clear()
        await asyncio.gather(*(client.drop() for client in list(self._clients.values())))

    async def close(self) -> None:
        """End all workers."""
        self._closed = True
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()
        await cancel_all(self._tasks, "starts of agent workers")
        await asyncio.gather(*(self._shut(index, client.actor) for index, client in clients.items()))

    async def _shut(self, index: int, actor: Any) -> None:  # noqa: ANN401  # Ray does not know the type
        try:
            async with asyncio.timeout(self._timeouts.shutdown_s / 4):
                await actor.shutdown.remote()
        except Exception as error:
            logger.warning("agent worker %d did not close: %r", index, error)
        self._end(actor)

    def _open(self, index: int, actor: Any) -> None:  # noqa: ANN401  # Ray does not know the type
        client: LinkClient[ToWorker] = LinkClient(
            f"agent worker {index}", actor, self._timeouts.rpc_s, self._receive,
            lambda error: self._lose(index, client, error), lambda: self._loops[index],
        )  # fmt: skip
        self._clients[index] = client
        client.open()
        self._do(self._assign_waiting())

    def _client_of(self, remote: RemoteRun) -> LinkClient[ToWorker] | None:
        return None if remote.worker is None else self._clients.get(remote.worker)

    async def _assign_waiting(self) -> None:
        """Assign the waiting loops, one run per turn of the event loop: each is written out in full."""
        while self._without_worker and (self._clients or not self._starting):
            self._assign(self._without_worker.popleft())
            await asyncio.sleep(0)

    def _assign(self, remote: RemoteRun) -> None:
        """Give loops to the worker with the fewest."""
        if not self._clients:
            if not self._starting:
                remote.ended.set_exception(NoWorkerLeft("no agent worker is left, see RUN_DIR/logs/worker-*.log"))
            else:
                self._without_worker.append(remote)
            return
        index = min(self._clients, key=lambda each: (self._loops[each], each))
        number = next(self._numbers)
        self._runs[number] = remote
        self._loops[index] += len(remote.run.job.samples)
        self._clients[index].send(remote.assign(index, number))

    def _leave(self, remote: RemoteRun) -> None:
        """Record that no worker has the loops."""
        if self._runs.pop(remote.number, None) is not None:
            self._loops[remote.worker] -= len(remote.run.job.samples)

    def _release(self, remote: RemoteRun) -> None:
        self._leave(remote)
        if remote in self._without_worker:
            self._without_worker.remove(remote)
        remote.close()

    async def _receive(self, report: Sequence[ToController]) -> None:
        for number, message in enumerate(report, start=1):
            if (remote := self._runs.get(message.run)) is not None:  # else that run is over
                self._handle(remote, message)
            if number % SLICE == 0:
                await asyncio.sleep(0)

    def _handle(self, remote: RemoteRun, message: ToController) -> None:
        if isinstance(message, LoopRequest):
            client = self._client_of(remote)
            assert client is not None  # the run belongs to a live worker
            remote.ask(message, client.send)
        elif isinstance(message, Frozen):
            remote.freeze(message)
        elif isinstance(message, Persist):
            self._do(self._persist(remote, message))
        else:
            self._leave(remote)
            remote.run.stats.add(message.stats)
            if remote.ended.done():  # it was cancelled
                return
            if isinstance(message.result, SentFailure):
                remote.ended.set_exception(message.result.exception())
            else:
                remote.ended.set_result(message.result)

    async def _persist(self, remote: RemoteRun, message: Persist) -> None:
        failure = None
        try:
            await remote.run.persist()
        except Exception as error:
            failure = SentFailure.of(error)
        if remote.number == message.run and (client := self._client_of(remote)) is not None:
            client.send(LoopAnswer(message.run, message.number, None, failure))

    def _lose(self, index: int, client: LinkClient[ToWorker], error: LinkLost) -> None:
        """Move the loops of a lost worker to the others, and replace it."""
        if self._closed or self._clients.get(index) is not client:
            return
        del self._clients[index]
        self._end(client.actor)
        self._starting.add(index)
        lost = [remote for remote in self._runs.values() if remote.worker == index]
        groups = sum(remote.is_group for remote in lost)
        logger.warning("%s; its %d groups continue elsewhere", error, groups)
        events.fault("agent_worker", f"{error}; its {groups} groups continue elsewhere")
        self.lost += 1
        for remote in lost:
            self._leave(remote)
            remote.take_away()
            if remote.ended.done():  # as in `_handle`
                continue
            if remote.lost_workers >= MOST_LOST:
                remote.ended.set_exception(
                    LostWithWorkers(f"{MOST_LOST} agent workers were lost with {remote.run.job}; the last: {error}")
                )
                continue
            self.redone += remote.is_group
            self._without_worker.append(remote)
        self._do(self._assign_waiting())
        self._do(self._replace(index, error))

    async def _replace(self, index: int, reason: LinkLost) -> None:
        try:
            for attempt in range(1, START_ATTEMPTS + 1):
                try:
                    actor = await self._start(index)
                    self._starting.discard(index)
                    self._open(index, actor)
                    events.recovery("agent_worker", f"agent worker {index} was started again")
                    return
                except Exception as error:
                    logger.warning("agent worker %d, start %d of %d: %s", index, attempt, START_ATTEMPTS, error)
                    if attempt < START_ATTEMPTS:
                        await asyncio.sleep(RETRY_S)
        finally:
            self._starting.discard(index)
        left = "the others continue without it" if self._clients else "there is no other one"
        self._notify(f"{reason}; no agent worker could be started in its place in {START_ATTEMPTS} attempts: {left}")
        await self._assign_waiting()

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def make_worker_pool(
    workers: int, timeouts: TimeoutsConfig, pool: ReplicaSpec, cwd: str, kind: type[AgentWorker]
) -> WorkerPool:
    """Return an unstarted pool of workers of class `kind`; `pool`, `cwd`: see `WorkerSpec`."""
    import ray

    async def start(index: int) -> ActorHandle:
        return await start_worker(WorkerSpec(pool, index, cwd), timeouts.engine_start_s, kind)

    return WorkerPool(workers, timeouts, start=start, end=ray.kill, notify=partial(write_notice, Path(pool.run_dir)))
