"""Agent workers without processes: they run their loops in the test's own, get copies of all messages, and can die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.agents.group_runner import GroupRunner
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.rollout.workers.messages import StartGroup
from megarl.rollout.workers.worker_groups import WorkerGroups
from megarl.rollout.workers.worker_loops import WorkerLoops
from megarl.rollout.workers.worker_runs import LoopParts
from tests.support.engines.fake_replicas import Method
from tests.support.rollout.fake_rollout import FakeQueue


class ActorDiedError(Exception):
    """Has the name of Ray's error."""


@dataclass
class LocalWorker:
    """Stands for the actor of a worker. `silent`: it answers nothing any more. `told`: the messages that it was given.

    `kept_reports`: those that the controller has taken.
    """

    loops: WorkerLoops
    silent: bool = False
    told: list[Any] = field(default_factory=list)
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
        for group in self.loops._runs.values():
            for task in group.tasks:
                task.cancel()

    async def _give(self, number: int, messages: Any) -> None:
        self.told += messages
        await self._living(self.loops.give(number, cloudpickle.loads(cloudpickle.dumps(messages))))

    async def _take(self, seen: int, wait_s: float) -> Any:
        report = await self._living(self.loops.take(seen, wait_s))
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
    """The queue as all workers and the controller write to it. `hold` is awaited before rows are written."""

    hold: Callable[[], Any] | None = None

    async def put_group(self, rows: Any, *, more: bool = False) -> None:
        if self.hold is not None:
            await self.hold()
        await super().put_group(rows, more=more)

    async def settle(self) -> None: ...


class Crew:
    """Several workers and the controller's part of them. `made`: all workers that were ever started, in their order."""

    def __init__(
        self, config: Config, loop: AgentLoop, runner: GroupRunner, queue: WorkerQueue,
        eval_toolboxes: Mapping[str, Toolbox] | None = None,
    ) -> None:  # fmt: skip
        """`runner`: that of the controller. `eval_toolboxes`: of held-out sets, by name.

        While `refuses` is set, no worker can be started.
        """
        self.queue = queue
        self.made: list[LocalWorker] = []
        self.notices: list[str] = []
        self.refuses = False
        parts = LoopParts(
            loop, runner.rewards, queue, runner.source.decode_all, runner.toolboxes, eval_toolboxes or {}  # type: ignore[arg-type]
        )  # fmt: skip

        async def start(index: int) -> Any:
            await asyncio.sleep(0)
            if self.refuses:
                raise OSError("no memory")
            self.made.append(LocalWorker(WorkerLoops(config, "p", parts)))
            return self.made[-1]

        source: Any = runner.source
        writer: Any = queue
        self.groups = WorkerGroups(
            config,
            source,
            runner.generate,
            runner.groups,
            writer,
            start=start,
            end=lambda actor: None,
            notify=self.notices.append,
        )

    def starts_of(self, group: int) -> list[tuple[LocalWorker, StartGroup]]:
        """The messages with which workers were given a group, in their order."""
        found = [
            (message.run, worker, message)
            for worker in self.made
            for message in worker.told
            if isinstance(message, StartGroup) and message.group == group
        ]
        return [(worker, message) for _, worker, message in sorted(found, key=lambda each: each[0])]


def rows_of(queue: FakeQueue, group: int) -> list[Trajectory]:
    """The rows of a group in the queue, in the order of the samples."""
    rows = [row for row in queue.rows.values() if row.group_id == group]
    return sorted(rows, key=lambda row: row.sample_index)
