"""The loops that an agent worker runs: of one group, or of one response of an evaluation.

Requests go to the controller, which has the engines, and so do the records of the loops: a worker that is started in
place of a dead one goes on from there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from megarl.common.values import first_parts
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.agents.batch_stats import BatchStats, RunningGroups
from megarl.rollout.agents.eval_context import EvalContext, evaluate_response
from megarl.rollout.agents.group_runner import GroupRunner, RewardScorer
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.engine.teachers.teacher_client import Teachers
from megarl.rollout.resume.group_progress import GroupProgress, RequestPlace, UnfinishedGroup
from megarl.rollout.resume.journal import problem
from megarl.rollout.resume.journal_records import decode_unfinished, encode_group
from megarl.rollout.tasks.prompts import PromptTask
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.rollout.transport.batch_decoder import BatchDecoder
from megarl.rollout.transport.gather import Outbox
from megarl.rollout.workers.messages import (
    Answered,
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
    StartGroup,
    StartResponse,
    ToController,
    ToWorker,
)

logger = logging.getLogger(__name__)


class RowWriter(Protocol):
    """The way of rows to the queue (`QueueWriter`)."""

    async def put_group(self, trajectories: Sequence[Trajectory], *, more: bool = False) -> None:
        """Write the rows of a group."""
        ...

    async def settle(self) -> None:
        """Wait for the end of what is being written, and drop what waits."""
        ...


@dataclass(frozen=True)
class LoopParts:
    """The parts that all loops share. `toolboxes` and `eval_toolboxes`: of training and of held-out sets, by name.

    `waiting`: see `WorkerReport`.
    """

    loop: AgentLoop
    rewards: RewardScorer
    writer: RowWriter
    decode_all: Callable[[Sequence[Sequence[int]]], list[str]]
    toolboxes: Mapping[str, Toolbox] = field(default_factory=dict)
    eval_toolboxes: Mapping[str, Toolbox] = field(default_factory=dict)
    waiting: Callable[[], str] = str
    teachers: Teachers | None = None


@dataclass(frozen=True)
class _OneProblem:
    """The problem of the one group that a runner runs."""

    drawn: PromptTask
    decode_all: Callable[[Sequence[Sequence[int]]], list[str]]

    def draw(self, group_id: int) -> PromptTask:
        return self.drawn


class WorkerRun(ABC):
    """One run of the loops of a group or of a response; its requests go to the controller (`generate`)."""

    def __init__(self, number: int, loops: int, outbox: Outbox[ToController]) -> None:
        self.number, self.loops, self.outbox = number, loops, outbox
        self.tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[RequestPlace, asyncio.Future[GenerateResult]] = {}
        self._persisting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._forget: Callable[[WorkerRun], object] = lambda run: None

    @property
    @abstractmethod
    def progress(self) -> GroupProgress | None:
        """The requests and the records of the loops; None while they do not run."""

    @abstractmethod
    async def run(self) -> None:
        """Run the loops, and send their end."""

    def begin(self, forget: Callable[[WorkerRun], object]) -> None:
        """Begin to run the loops. `forget` is called when the controller needs nothing more of them."""
        self._forget = forget
        self.do(self._run())

    def receive(self, message: ToWorker) -> None:
        """Take a message of the controller."""
        if isinstance(message, Answered):
            _settle(self._asked.pop(message.place, None), message.result, message.failure)
        elif isinstance(message, Persisted):
            _settle(self._persisting.pop(message.number, None), None, message.failure)
        elif isinstance(message, GroupVerdict | DropGroup):
            for task in self.tasks:
                task.cancel()
            self.forget()

    def send_records(self, samples: set[int] | None = None) -> int:
        """Send the records of loops that have changed, of these `samples` or of all; return how many these are."""
        progress = self.progress
        if progress is None:
            return 0
        changed = progress.changed if samples is None else progress.changed & samples
        for sample in sorted(changed):
            loop = progress.loops[sample]
            self.outbox.put(Frozen(self.number, sample, loop.version, loop.encoded()))
        count = len(changed)
        progress.changed -= changed
        return count

    async def generate(self, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        """Have the controller answer a request; it knows all of its context but the replica."""
        progress = self.progress
        assert progress is not None  # the loops run
        place = progress.place(request.request_id)
        self.send_records({place[0]})  # before it, so that nobody has a response to a turn of which nothing is known
        answer: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._asked[place] = answer
        self.outbox.put(Asked(self.number, place, request, context.near, progress.prompt(request.request_id)))
        return await answer

    async def persist(self) -> None:
        """Return when the records of the loops are kept. Raises RolloutError if they cannot be written."""
        self.send_records()
        number = next(self._numbers)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._persisting[number] = written
        self.outbox.put(Persist(self.number, number))
        await written

    def forget(self) -> None:
        """Let nothing more arrive."""
        self._forget(self)

    def do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task of this run."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @abstractmethod
    def taken_stats(self) -> BatchStats:
        """Return what was measured of the loops."""

    async def _run(self) -> None:
        try:
            await self.run()
        except Exception as error:
            logger.warning("run %d failed", self.number, exc_info=error)
            self.outbox.put(Failed(self.number, SentFailure.of(error), self.taken_stats()))
            self.forget()


class WorkerGroup(WorkerRun):
    """One run of one group, from its loops to its rows in the queue."""

    def __init__(
        self, start: StartGroup, config: Config, partition: str, parts: LoopParts, decoder: BatchDecoder,
        outbox: Outbox[ToController],
    ) -> None:  # fmt: skip
        super().__init__(start.run, config.batch.samples_per_group, outbox)
        self._start, self._parts = start, parts
        problem_ = _OneProblem(start.drawn, parts.decode_all)
        self._runner = GroupRunner(
            config, parts.loop, problem_, self.generate, parts.rewards,
            partition=partition, toolboxes=parts.toolboxes, decoder=decoder, teachers=parts.teachers,
            groups=RunningGroups(self._persist),
        )  # fmt: skip
        self._rows: list[Trajectory] = []

    @property
    def progress(self) -> GroupProgress | None:
        """See `WorkerRun.progress`."""
        return self._runner.groups.progress.get(self._start.group)

    def taken_stats(self) -> BatchStats:
        """See `WorkerRun.taken_stats`."""
        return self._runner.groups.stats

    def receive(self, message: ToWorker) -> None:
        """See `WorkerRun.receive`."""
        if isinstance(message, GroupVerdict) and message.queue:
            self.do(self._put(message.more))
        else:
            super().receive(message)

    async def run(self) -> None:
        """See `WorkerRun.run`."""
        start = self._start
        rows = await self._runner.run(start.group, _decoded(start.kept), start.left_s)
        asked = problem(start.drawn.ids, start.drawn.dataset, start.drawn.answer)
        ended = Ended(
            start.run,
            tuple(row.tag for row in rows),
            tuple(row.failure for row in first_parts(rows) if row.status != "ok"),
            frozenset(span.counts_as for row in rows for span in row.versions),
            encode_group(rows, asked),
            self.taken_stats(),
        )
        self._rows = rows
        self.outbox.put(ended)

    async def _persist(self, group_id: int, progress: Mapping[int, GroupProgress]) -> None:
        await self.persist()

    async def _put(self, more: bool) -> None:
        failure = None
        try:
            await self._parts.writer.put_group(self._rows, more=more)
        except Exception as error:
            failure = SentFailure.of(error)
        self.outbox.put(Queued(self._start.run, failure))
        self.forget()


class WorkerResponse(WorkerRun):
    """One run of the loop of one response of an evaluation."""

    def __init__(self, start: StartResponse, parts: LoopParts, outbox: Outbox[ToController]) -> None:
        super().__init__(start.run, 1, outbox)
        chosen = start.task.chosen
        chosen = replace(chosen, toolbox=parts.eval_toolboxes.get(chosen.name))
        self._loop = parts.loop
        self._ctx = EvalContext(
            replace(start.task, chosen=chosen),
            self.generate,
            partial(parts.rewards.score, function=chosen.reward),
            lambda ids: parts.decode_all([ids])[0],
            _decoded(start.kept),
            self.persist,
        )

    @property
    def progress(self) -> GroupProgress:
        """See `WorkerRun.progress`."""
        return self._ctx.progress

    def taken_stats(self) -> BatchStats:
        """See `WorkerRun.taken_stats`: the report of the evaluation has its own figures."""
        return BatchStats()

    async def run(self) -> None:
        """See `WorkerRun.run`."""
        self.outbox.put(Responded(self.number, await evaluate_response(self._loop, self._ctx)))
        self.forget()


def _decoded(kept: bytes | None) -> UnfinishedGroup | None:
    return None if kept is None else decode_unfinished(kept)


def _settle(future: asyncio.Future[Any] | None, result: object, failure: SentFailure | None) -> None:
    """Give one that still waits its result, or raise there what has failed."""
    if future is None or future.done():
        return
    if failure is not None:
        future.set_exception(failure.exception())
    else:
        future.set_result(result)
