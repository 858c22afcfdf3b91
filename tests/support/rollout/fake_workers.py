"""Agent workers without processes: they run their loops in the test's own, get copies of all messages, and can die."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.workers.messages import Start
from megarl.rollout.workers.worker_loops import WorkerLoops
from megarl.rollout.workers.worker_pool import WorkerPool
from tests.support.engines.fake_replicas import Method
from tests.support.rollout.fake_rollout import FakeQueue
from tests.support.rollout.group_runner import GroupRunner


class ActorDiedError(Exception):
    """Has the name of Ray's error."""


@dataclass
class LocalWorker:
    """Stands for the actor of a worker. `silent`: it answers nothing any more. `received`: its messages.

    `kept_reports`: those that the controller has taken.
    """

    loops: WorkerLoops
    silent: bool = False
    received: list[Any] = field(default_factory=list)
    kept_reports: list[Any] = field(default_factory=list)
    _dead: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._passing = asyncio.ensure_future(self.loops.pass_on())
        self.give, self.take = Method(self._give), Method(self._take)
        self.drop, self.shutdown = Method(self._drop), Method(self._drop)

    def die(self) -> None:
        """End at once: nothing more is sent, and nothing that runs goes on."""
        self._dead.set()
        self._passing.cancel()
        for run in self.loops._runs.values():
            run.task.cancel()

    async def _give(self, number: int, messages: Any) -> None:
        self.received += messages
        await self._living(self.loops.link.give(number, cloudpickle.loads(cloudpickle.dumps(messages))))

    async def _take(self, seen: int, wait_s: float) -> Any:
        report = await self._living(self.loops.link.take(seen, wait_s))
        self.kept_reports.append(report)
        return cloudpickle.loads(cloudpickle.dumps(report))

    async def _drop(self) -> None:
        await self._living(self.loops.drop())

    async def _living(self, work: Any) -> Any:
        if self.silent:
            work.close()
            await asyncio.Event().wait()
        working, death = asyncio.ensure_future(work), asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({working, death}, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.is_set():
                raise ActorDiedError("the worker died")
            return working.result()
        finally:
            working.cancel()
            death.cancel()


class WorkerQueue(FakeQueue):
    """`hold` is awaited before rows are written."""

    hold: Callable[[], Any] | None = None

    async def put_group(self, rows: Any, files: Any = None, *, more: bool = False) -> None:
        if self.hold is not None:
            await self.hold()
        await super().put_group(rows, more=more)


class Crew:
    """Several workers and the controller's part of them. `made`: all workers that were ever started, in their order."""

    def __init__(self, config: Config, runner: GroupRunner, queue: WorkerQueue | None = None) -> None:
        """`runner`: runs the loops of all workers. While `refuses` is set, no worker can be started."""
        self.runner, self.queue = runner, queue or WorkerQueue()
        self.made: list[LocalWorker] = []
        self.notices: list[str] = []
        self.refuses = False

        async def start(index: int) -> Any:
            await asyncio.sleep(0)
            if self.refuses:
                raise OSError("no memory")
            self.made.append(LocalWorker(WorkerLoops(runner.host)))
            return self.made[-1]

        workers, end = config.rollout.agent_workers, lambda actor: None
        self.pool = WorkerPool(workers, config.timeouts, start=start, end=end, notify=self.notices.append)

    async def run(self, group: int) -> list[Trajectory]:
        """Run a group, and put its rows into the queue."""
        rows = await self.runner.groups.run(group, None, self.pool.run_group)
        await self.queue.put_group(rows)
        return rows

    def starts_of(self, group: int) -> list[tuple[LocalWorker, Start]]:
        """The messages with which workers were given a group, in their order."""
        found = [
            (message.run, worker, message)
            for worker in self.made
            for message in worker.received
            if isinstance(message, Start) and message.job.group == group
        ]
        return [(worker, message) for _, worker, message in sorted(found, key=lambda each: each[0])]


def rows_of(queue: FakeQueue, group: int) -> list[Trajectory]:
    """The rows of a group in the queue, in the order of the samples."""
    rows = [row for row in queue.rows.values() if row.group_id == group]
    return sorted(rows, key=lambda row: row.sample_index)
