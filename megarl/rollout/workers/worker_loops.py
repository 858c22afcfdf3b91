"""The groups that an agent worker runs: their loops, from the controller's message to the rows in the queue.

Requests go to the controller, which has the engines, and so do the records of the loops: a worker that is started in
place of a dead one goes on from there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.common.sample_parts import first_parts
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.background import cancel_all
from megarl.rollout.batch_decoder import BatchDecoder
from megarl.rollout.group_deadline import GroupDeadline
from megarl.rollout.group_progress import GroupProgress, RequestPlace
from megarl.rollout.group_runner import GroupRunner, Judges
from megarl.rollout.journal import problem
from megarl.rollout.journal_records import decode_unfinished, encode_group
from megarl.rollout.outbox import Outbox
from megarl.rollout.prompts import Drawn
from megarl.rollout.requests import GenerateRequest, GenerateResult
from megarl.rollout.response_parts import ResponsePart
from megarl.rollout.teachers.teacher_client import Teachers
from megarl.rollout.toolbox import Toolbox
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
    SentFailure,
    StartGroup,
    ToController,
    ToWorker,
    WorkerReport,
)

logger = logging.getLogger(__name__)

FREEZE_S = 0.5  # by which the controller's records of the loops may be behind
SLICE = 16  # messages that are handled at once
ENCODED_AT_ONCE = 64  # records, between which other tasks run


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
    """The parts that the loops of all groups share. `waiting`: see `WorkerReport`."""

    loop: AgentLoop
    rewards: Judges
    writer: RowWriter
    decode_all: Callable[[Sequence[Sequence[int]]], list[str]]
    toolboxes: Mapping[str, Toolbox] = field(default_factory=dict)
    waiting: Callable[[], str] = str
    teachers: Teachers | None = None


class WorkerLoops:
    """Takes the controller's messages, runs groups, and keeps the answers until the controller takes them."""

    def __init__(self, config: Config, partition: str, parts: LoopParts) -> None:
        """`partition`: that of the queue; it makes request ids unique."""
        self._config, self._partition, self._parts = config, partition, parts
        self._decoder = BatchDecoder(parts.decode_all, config.timeouts.rpc_s)
        self._groups: dict[int, _WorkerGroup] = {}  # by run
        samples = config.batch.samples_per_group
        self._outbox: Outbox[ToController] = Outbox(lambda: samples * len(self._groups))
        self._given = 0  # the number of the last call of `give`
        self._report = WorkerReport(0)
        self._taking = asyncio.Lock()

    async def give(self, number: int, messages: Sequence[ToWorker]) -> None:
        """Take messages of the controller. `number`: of the call; one that was made twice counts once."""
        if number <= self._given:
            return
        self._given = number
        for count, message in enumerate(messages):
            if count % SLICE == 0:  # each of them lets loops go on
                await asyncio.sleep(0)
            if isinstance(message, StartGroup):
                self._start(message)
            elif (group := self._groups.get(message.run)) is not None:
                group.receive(message)

    async def take(self, seen: int, wait_s: float) -> WorkerReport:
        """Return news: at once if there are any, after `wait_s` at the latest.

        `seen`: the number of the last report that the controller has; a later one was lost on its way, and is repeated.
        """
        async with self._taking:
            if seen == self._report.number:
                messages = tuple(await self._outbox.take(wait_s))
                self._report = WorkerReport(seen + 1, messages, self._parts.waiting())
            return self._report

    async def drop(self) -> None:
        """Forget all groups. When this returns, none of their rows is on its way to the queue."""
        groups, self._groups = list(self._groups.values()), {}
        await cancel_all([task for group in groups for task in group.tasks], "groups of an agent worker")
        await self._parts.writer.settle()
        self._outbox.clear()

    async def pass_on(self) -> None:
        """Send the records of the loops at intervals. Never ends."""
        while True:
            await asyncio.sleep(FREEZE_S)
            encoded = 0
            for group in list(self._groups.values()):
                encoded += group.send_records()
                if encoded >= ENCODED_AT_ONCE:
                    encoded = 0
                    await asyncio.sleep(0)

    def _start(self, start: StartGroup) -> None:
        group = _WorkerGroup(start, self._config, self._partition, self._parts, self._decoder, self._outbox)
        self._groups[start.run] = group
        group.begin(lambda: self._groups.pop(start.run, None))


@dataclass(frozen=True)
class _OneProblem:
    """The problem of the one group that a runner runs."""

    drawn: Drawn
    decode_all: Callable[[Sequence[Sequence[int]]], list[str]]

    def draw(self, group_id: int) -> Drawn:
        return self.drawn

    def dataset(self, group_id: int) -> str:
        return self.drawn.dataset


class _WorkerGroup:
    """One run of one group; its requests go to the controller (`generate` is that of `Engines`)."""

    def __init__(
        self, start: StartGroup, config: Config, partition: str, parts: LoopParts, decoder: BatchDecoder,
        outbox: Outbox[ToController],
    ) -> None:  # fmt: skip
        self._start, self._parts, self._outbox = start, parts, outbox
        problem_ = _OneProblem(start.drawn, parts.decode_all)
        self._runner = GroupRunner(
            config, parts.loop, problem_, self, parts.rewards,
            partition=partition, toolboxes=parts.toolboxes, decoder=decoder, teachers=parts.teachers,
        )  # fmt: skip
        self._runner.persist = self._persist
        self._rows: list[Trajectory] = []
        self._asked: dict[RequestPlace, asyncio.Future[GenerateResult]] = {}
        self._persisting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self.tasks: set[asyncio.Task[None]] = set()
        self._forget: Callable[[], object] = lambda: None

    def begin(self, forget: Callable[[], object]) -> None:
        """Begin to run the loops. `forget` is called when the controller needs nothing more of the group."""
        self._forget = forget
        self._do(self._run())

    def receive(self, message: ToWorker) -> None:
        """Take a message of the controller."""
        if isinstance(message, Answered):
            _settle(self._asked.pop(message.place, None), message.result, message.failure)
        elif isinstance(message, Persisted):
            _settle(self._persisting.pop(message.number, None), None, message.failure)
        elif isinstance(message, GroupVerdict) and message.queue:
            self._do(self._put(message.more))
        elif isinstance(message, GroupVerdict | DropGroup):
            for task in self.tasks:
                task.cancel()
            self._forget()

    def send_records(self, samples: set[int] | None = None) -> int:
        """Send the records of loops that have changed, of these `samples` or of all; return how many these are."""
        progress = self._progress
        if progress is None:
            return 0
        changed = progress.changed if samples is None else progress.changed & samples
        for sample in sorted(changed):
            loop = progress.loops[sample]
            self._outbox.put(Frozen(self._start.run, sample, loop.version, loop.encoded()))
        count = len(changed)
        progress.changed -= changed
        return count

    async def generate(
        self, request: GenerateRequest, prefix: Hashable = None, home: int | None = None,
        deadline: GroupDeadline | None = None, tokens: MutableMapping[str, ResponsePart] | None = None,
        near: int | None = None,
    ) -> GenerateResult:  # fmt: skip
        """Have the controller answer a request; it knows the group's prefix, home, deadline and tokens."""
        progress = self._progress
        assert progress is not None  # the group is running
        place = progress.place(request.request_id)
        self.send_records({place[0]})  # before it, so that nobody has a response to a turn of which nothing is known
        answer: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._asked[place] = answer
        self._outbox.put(Asked(self._start.run, place, request, near))
        return await answer

    @property
    def _progress(self) -> GroupProgress | None:
        return self._runner.progress.get(self._start.group)

    async def _persist(self, group_id: int) -> None:
        """Return when the records of the loops are on the disk. Raises RolloutError if they cannot be written."""
        self.send_records()
        number = next(self._numbers)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._persisting[number] = written
        self._outbox.put(Persist(self._start.run, number))
        await written

    async def _run(self) -> None:
        start, runner = self._start, self._runner
        try:
            kept = None if start.kept is None else decode_unfinished(start.kept)
            rows = await runner.run(start.group, kept, start.left_s)
            asked = problem(start.drawn.ids, start.drawn.dataset, start.drawn.answer)
            ended = Ended(
                start.run,
                tuple(row.tag for row in rows),
                tuple(row.failure for row in first_parts(rows) if row.status != "ok"),
                frozenset(span.counts_as for row in rows for span in row.versions),
                encode_group(rows, asked),
                runner.stats,
            )
        except Exception as error:
            logger.warning("group %d failed", start.group, exc_info=error)
            self._outbox.put(Failed(start.run, SentFailure.of(error), runner.stats))
            self._forget()
            return
        self._rows = rows
        self._outbox.put(ended)

    async def _put(self, more: bool) -> None:
        failure = None
        try:
            await self._parts.writer.put_group(self._rows, more=more)
        except Exception as error:
            failure = SentFailure.of(error)
        self._outbox.put(Queued(self._start.run, failure))
        self._forget()

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def _settle(future: asyncio.Future[Any] | None, result: object, failure: SentFailure | None) -> None:
    """Give one that still waits its result, or raise there what has failed."""
    if future is None or future.done():
        return
    if failure is not None:
        future.set_exception(failure.exception())
    else:
        future.set_result(result)
