"""The loops that agent workers run: which worker has which, and what happens to them when one is lost.

Every group, and every response of an evaluation, is with exactly one worker, or waits for one. The controller keeps the
requests, the tokens and the records of its loops (`RemoteRun`), so that they go on in another worker if theirs is lost.
What a lost worker says later is of a run that is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.common.errors import LostWithWorkers, NoWorkerLeft
from megarl.common.rundir.notices import write_notice
from megarl.common.values import first_parts
from megarl.config.schema import Config
from megarl.queue.trajectory import SampleTag
from megarl.queue.transfer import QueueWriter
from megarl.rollout.agents.batch_stats import RunningGroups
from megarl.rollout.agents.eval_context import EvaluatedResponse
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.request_context import Generate
from megarl.rollout.resume.group_progress import UnfinishedGroup
from megarl.rollout.resume.journal import RolloutJournal
from megarl.rollout.resume.journal_records import decode_group
from megarl.rollout.tasks.eval_sets import EvalTask
from megarl.rollout.tasks.prompts import PromptSource
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.workers.agent_worker import AgentWorker, WorkerSpec, start_worker
from megarl.rollout.workers.finished_group import GroupEnd
from megarl.rollout.workers.messages import (
    Asked,
    DropGroup,
    Ended,
    Failed,
    Frozen,
    GroupVerdict,
    Persist,
    Persisted,
    Queued,
    Responded,
    SentFailure,
    ToController,
    WorkerReport,
)
from megarl.rollout.workers.remote_run import RemoteGroup, RemoteResponse, RemoteRun
from megarl.rollout.workers.worker_client import WorkerActor, WorkerClient, WorkerLost
from megarl.telemetry.trace import events

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

MOST_LOST = 5  # workers with which one group, or response, may be lost; it may be what kills them
START_ATTEMPTS = 3  # of a worker in place of a lost one
RETRY_S = 5.0
SLICE = 32  # messages that are handled at once, each of which may begin a call to an engine


class WorkerGroups:
    """Runs loops in workers, those of a group by `run`, of a response by `respond`; starts workers for lost ones."""

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        generate: Generate,
        running: RunningGroups,
        writer: QueueWriter,
        *,
        start: Callable[[int], Awaitable[WorkerActor]],
        end: Callable[[WorkerActor], object],
        notify: Callable[[str], object],
    ) -> None:
        """`generate`: the way to the engines. `running`: keeps progress and measurements.

        `start(index)`: creates and starts a worker. `end`: kills one. `notify`: tells the user.
        """
        self._config, self._source, self._generate, self._writer = config, source, generate, writer
        self._running = running
        self._start, self._end, self._notify = start, end, notify
        self._links: dict[int, WorkerClient] = {}
        self._runs: dict[int, RemoteRun] = {}
        self._loops: Counter[int | None] = Counter()  # of those runs, by worker
        self._without_worker: deque[RemoteRun] = deque()
        self._numbers = itertools.count()
        self._drawing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[int] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all workers. Raises what the first one that does not start raises."""
        indices = range(self._config.rollout.agent_workers)
        actors = await asyncio.gather(*(self._start(index) for index in indices))
        for index, actor in zip(indices, actors, strict=True):
            self._open(index, actor)

    @property
    def alive(self) -> int:
        """The number of workers that run groups."""
        return len(self._links)

    def waiting(self) -> str:
        """Describe what the workers work on, as the end of a sentence."""
        parts = []
        for index, link in self._links.items():
            runs = [run for run in self._runs.values() if run.worker == index]
            groups = sum(isinstance(run, RemoteGroup) for run in runs)
            evaluated = f" and {len(runs) - groups} responses of an evaluation" if len(runs) > groups else ""
            parts.append(f"; agent worker {index} has {groups} groups{evaluated}{link.waiting}")
        if self._without_worker:
            parts.append(f"; {len(self._without_worker)} of these wait for an agent worker")
        return "".join(parts)

    async def run(self, group_id: int, kept: UnfinishedGroup | None = None) -> GroupEnd:
        """Run the loops of a group in a worker, and in another one if that is lost. Return how the group has ended.

        `kept`: what it had in an attempt before, which is continued. Raises what a loop raised, LostWithWorkers if
        several workers were lost with the group, NoWorkerLeft if there is none and none is coming.
        """
        async with self._drawing:  # many groups may begin at once: other tasks run between two prompts
            drawn = self._source.draw(group_id)
            await asyncio.sleep(0)
        remote = RemoteGroup(
            group_id, drawn, kept, GroupDeadline.of(self._config, time.monotonic()),
            config=self._config, generate=self._generate, persist=self._running.persist,
        )  # fmt: skip
        with self._running.running(group_id, remote.progress):
            try:
                self._assign(remote)
                ended: Ended = await remote.ended
            except BaseException:
                self._forget(remote)
                raise
        return RowsElsewhere(self, remote, ended)

    async def respond(self, task: EvalTask, generate: Generate) -> EvaluatedResponse:
        """Run the loop of a response in a worker, and in another one if that is lost. Return how it has ended.

        `generate`: the evaluation's way to the engines. Raises as `run`.
        """
        remote = RemoteResponse(task, generate)
        try:
            self._assign(remote)
            ended: EvaluatedResponse = await remote.ended
            return ended
        finally:
            self._forget(remote)

    async def put(self, remote: RemoteGroup, ended: Ended, *, more: bool) -> None:
        """Have a worker write the rows of a group to the queue. If it is lost, they are written here."""
        try:
            if (link := self._link_of(remote)) is not None:
                link.send(GroupVerdict(remote.run, queue=True, more=more))
                try:
                    await remote.queued
                    return
                except WorkerLost:
                    logger.warning("the rows of group %d are written by the controller", remote.group)
            rows = await asyncio.to_thread(decode_group, ended.record)
            await self._writer.clear([row.key for row in rows])  # what the worker may have written of them
            await self._writer.put_group(rows, more=more)
        finally:
            self._release(remote)

    def drop(self, remote: RemoteGroup) -> None:
        """Forget the rows of a group that has ended."""
        if (link := self._link_of(remote)) is not None:
            link.send(GroupVerdict(remote.run, queue=False))
        self._release(remote)

    async def drop_all(self) -> None:
        """Have all workers forget their groups; then none of these writes to the queue any more."""
        for remote in list(self._runs.values()):
            self._release(remote)
        self._without_worker.clear()
        await asyncio.gather(*(link.drop() for link in list(self._links.values())))

    async def close(self) -> None:
        """End all workers."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        await cancel_all(self._tasks, "starts of agent workers")
        await asyncio.gather(*(self._shut(link) for link in links))

    async def _shut(self, link: WorkerClient) -> None:
        try:
            async with asyncio.timeout(self._config.timeouts.shutdown_s / 4):
                await link.actor.shutdown.remote()
        except Exception as error:
            logger.warning("agent worker %d did not close: %r", link.index, error)
        self._end(link.actor)

    def _open(self, index: int, actor: WorkerActor) -> None:
        loops = lambda: self._loops[index]  # noqa: E731
        link = WorkerClient(index, actor, self._config.timeouts.rpc_s, self._receive, self._lose, loops)
        self._links[index] = link
        link.open()
        self._do(self._assign_waiting())

    def _link_of(self, remote: RemoteRun) -> WorkerClient | None:
        return None if remote.worker is None else self._links.get(remote.worker)

    async def _assign_waiting(self) -> None:
        """Give away what waits for a worker, one after the other: what they have is written for each."""
        while self._without_worker and (self._links or not self._starting):
            self._assign(self._without_worker.popleft())
            await asyncio.sleep(0)

    def _assign(self, remote: RemoteRun) -> None:
        """Give loops to the worker that has the fewest."""
        if not self._links:
            if not self._starting:
                remote.ended.set_exception(NoWorkerLeft("no agent worker is left, see RUN_DIR/logs/worker-*.log"))
            else:
                self._without_worker.append(remote)
            return
        index = min(self._links, key=lambda each: (self._loops[each], each))
        run = next(self._numbers)
        self._runs[run] = remote
        self._loops[index] += remote.loops
        self._links[index].send(remote.assign(index, run))

    def _forget(self, remote: RemoteRun) -> None:
        """End the loops that a worker may still run."""
        if (link := self._link_of(remote)) is not None and remote.run in self._runs:
            link.send(DropGroup(remote.run))
        self._release(remote)

    def _release(self, remote: RemoteRun) -> None:
        if self._runs.pop(remote.run, None) is not None:
            self._loops[remote.worker] -= remote.loops
        if remote in self._without_worker:
            self._without_worker.remove(remote)
        remote.close()

    async def _receive(self, report: WorkerReport) -> None:
        for number, message in enumerate(report.messages, start=1):
            if (remote := self._runs.get(message.run)) is not None:  # else that run is over
                self._handle(remote, message)
            if number % SLICE == 0:
                await asyncio.sleep(0)

    def _handle(self, remote: RemoteRun, message: ToController) -> None:
        if isinstance(message, Asked):
            remote.ask(message, self._links[_worker_of(remote)].send)
        elif isinstance(message, Frozen):
            remote.freeze(message)
        elif isinstance(message, Persist):
            self._do(self._persist(remote, message))
        elif isinstance(message, Ended | Failed):
            self._running.stats.add(message.stats)
            if isinstance(message, Ended):
                remote.ended.set_result(message)
            else:
                remote.ended.set_exception(message.failure.exception())
        elif isinstance(message, Responded):
            remote.ended.set_result(message.ended)
        elif isinstance(message, Queued) and isinstance(remote, RemoteGroup) and not remote.queued.done():
            if message.failure is None:
                remote.queued.set_result(None)
            else:
                remote.queued.set_exception(message.failure.exception())

    async def _persist(self, remote: RemoteRun, message: Persist) -> None:
        failure = None
        try:
            await remote.persist()
        except Exception as error:
            failure = SentFailure.of(error)
        if remote.run == message.run and (link := self._link_of(remote)) is not None:
            link.send(Persisted(message.run, message.number, failure))

    def _lose(self, link: WorkerClient, error: WorkerLost) -> None:
        """Let other workers go on with the loops of a lost one, and start another one in its place."""
        if self._closed or self._links.get(link.index) is not link:
            return
        del self._links[link.index]
        self._end(link.actor)
        self._starting.add(link.index)
        lost = [(run, remote) for run, remote in self._runs.items() if remote.worker == link.index]
        groups = sum(isinstance(remote, RemoteGroup) for _, remote in lost)
        logger.warning("%s; its %d groups go on elsewhere", error, groups)
        events.fault("agent_worker", f"{error}; its {groups} groups go on elsewhere")
        stats = self._running.stats
        stats.workers_lost += 1
        for run, remote in lost:
            del self._runs[run]
            self._loops[link.index] -= remote.loops
            remote.take_away()
            if remote.ended.done():  # its rows are here too
                if isinstance(remote, RemoteGroup) and not remote.queued.done():
                    remote.queued.set_exception(error)
                    remote.queued.exception()  # nobody may wait for it yet
                continue
            if remote.lost_workers >= MOST_LOST:
                remote.ended.set_exception(
                    LostWithWorkers(f"{MOST_LOST} agent workers were lost with {remote.name}; the last: {error}")
                )
                continue
            stats.redone += isinstance(remote, RemoteGroup)
            self._without_worker.append(remote)
        self._do(self._assign_waiting())
        self._do(self._replace(link.index, error))

    async def _replace(self, index: int, reason: WorkerLost) -> None:
        try:
            for attempt in range(1, START_ATTEMPTS + 1):
                try:
                    actor = await self._start(index)
                    self._starting.discard(index)
                    self._open(index, actor)
                    events.recovery("agent_worker", f"agent worker {index} was started anew")
                    return
                except Exception as error:
                    logger.warning("agent worker %d, start %d of %d: %s", index, attempt, START_ATTEMPTS, error)
                    if attempt < START_ATTEMPTS:
                        await asyncio.sleep(RETRY_S)
        finally:
            self._starting.discard(index)
        left = "the others go on without it" if self._links else "there is no other one"
        self._notify(f"{reason}; no agent worker could be started in its place in {START_ATTEMPTS} attempts: {left}")
        await self._assign_waiting()

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RowsElsewhere(GroupEnd):
    """The end of a group whose rows are in a worker; a copy is in the record for the journal."""

    def __init__(self, groups: WorkerGroups, remote: RemoteGroup, ended: Ended) -> None:
        self._groups, self._remote, self._ended = groups, remote, ended

    @property
    def tags(self) -> Sequence[SampleTag]:
        """See `GroupEnd.tags`."""
        return self._ended.tags

    @property
    def rewards(self) -> Sequence[float]:
        """See `GroupEnd.rewards`."""
        return [tag.reward for tag in first_parts(self._ended.tags) if not tag.failed]

    @property
    def failures(self) -> Sequence[str]:
        """See `GroupEnd.failures`."""
        return self._ended.failures

    @property
    def versions(self) -> Set[int]:
        """See `GroupEnd.versions`."""
        return self._ended.versions

    def note(self, journal: RolloutJournal, source: PromptSource) -> None:
        """See `GroupEnd.note`."""
        journal.note_record(self._ended.record)

    async def put(self, *, more: bool) -> None:
        """See `GroupEnd.put`."""
        await self._groups.put(self._remote, self._ended, more=more)

    def drop(self) -> None:
        """See `GroupEnd.drop`."""
        self._groups.drop(self._remote)


def _worker_of(remote: RemoteRun) -> int:
    assert remote.worker is not None  # it has a run
    return remote.worker


# The groups of a controller's agent workers: how a worker of them is started and ended.


def make_worker_groups(
    config: Config,
    source: PromptSource,
    generate: Generate,
    running: RunningGroups,
    writer: QueueWriter,
    *,
    pool: ReplicaSpec,
    partition: str,
    cwd: str,
    kind: type[AgentWorker],
) -> WorkerGroups:
    """Return the groups of workers that are not started. `kind`: the class of a worker; the rest is in `WorkerSpec`."""
    import ray

    bound_s = config.timeouts.engine_start_s

    async def start(index: int) -> ActorHandle:
        return await start_worker(WorkerSpec(pool, partition, index, cwd), bound_s, kind)

    notify = partial(write_notice, Path(pool.run_dir))
    return WorkerGroups(config, source, generate, running, writer, start=start, end=ray.kill, notify=notify)
