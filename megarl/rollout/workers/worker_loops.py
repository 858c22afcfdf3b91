"""The loops that the controller gives to an agent worker.

Their requests go to the controller, which has the engines, and so do their records: the replacement of a dead worker
continues from there.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.loop_host import EvaluatedResponse, LoopHost
from megarl.rollout.agents.loop_run import LoopRun
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.resume.group_progress import RequestPlace
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.gather import Outbox
from megarl.rollout.transport.link import LinkServer
from megarl.rollout.workers.messages import (
    Frozen,
    LoopAnswer,
    LoopEnd,
    LoopRequest,
    Persist,
    SentFailure,
    Start,
    ToController,
    ToWorker,
)

logger = logging.getLogger(__name__)

FREEZE_S = 0.5  # how old the controller's records of the loops may be
SLICE = 8  # messages handled at once: each wakes a loop, which computes for about a millisecond
RECORDS_AT_ONCE = 512  # sent before other tasks run


class WorkerRun(LoopRun):
    """A job in a worker: its requests and records go to the controller. `task` runs it."""

    task: asyncio.Task[None]

    def __init__(self, start: Start, outbox: Outbox[ToController]) -> None:
        deadline = None if start.deadline is None else start.deadline.received(time.monotonic())
        super().__init__(start.job, None, kept=start.kept, deadline=deadline)
        self.number, self._outbox = start.run, outbox
        self._waiting: dict[RequestPlace | int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._sent: set[str] = set()  # images of tools that the controller has

    def send_records(self, samples: set[int] | None = None) -> int:
        """Send the changed records of loops, of `samples` or of all; return how many."""
        progress = self.progress
        changed = progress.changed if samples is None else progress.changed & samples
        for sample in sorted(changed):
            self._outbox.put(Frozen(self.number, sample, progress.loops[sample]))
        count = len(changed)
        progress.changed -= changed
        return count

    async def generate(self, request: GenerateRequest, place: RequestPlace, near: int | None) -> GenerateResult:
        """See `LoopRun.generate`."""
        self.send_records({place[0]})  # first, so that no response belongs to an unknown turn
        answer = self._waiting[place] = asyncio.get_running_loop().create_future()
        if request.files:
            hashes = [image.hash for image in request.images]
            files = zip(hashes, request.files, strict=True)
            request = replace(request, files=tuple(b"" if name in self._sent else file for name, file in files))
            self._sent.update(hashes)
        self._outbox.put(LoopRequest(self.number, place, request, near, self.progress.prompt_of(place)))
        result: GenerateResult = await answer
        return result

    async def persist(self) -> None:
        """See `LoopRun.persist`."""
        self.send_records()
        number = next(self._numbers)
        written = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._outbox.put(Persist(self.number, number))
        await written

    def receive(self, message: LoopAnswer) -> None:
        """Pass the controller's answer to the waiting loop, or raise its failure there."""
        future = self._waiting.pop(message.key, None)
        if future is None or future.done():
            return
        if message.failure is not None:
            future.set_exception(message.failure.exception())
        else:
            future.set_result(message.result)


class WorkerLoops:
    """Runs the jobs that the controller gives to the worker by `link`."""

    def __init__(self, host: LoopHost, waiting: Callable[[], str] = str) -> None:
        """`waiting`: what the reward processes work on, as the end of a sentence."""
        self._host = host
        self._runs: dict[int, WorkerRun] = {}
        self.link: LinkServer[ToController] = LinkServer(self._receive, self.under_way, waiting=waiting)

    def under_way(self) -> int:
        """Return the number of loops that run."""
        return sum(len(run.job.samples) for run in self._runs.values())

    async def _receive(self, messages: Sequence[ToWorker]) -> None:
        """Take messages of the controller."""
        for count, message in enumerate(messages):
            if count % SLICE == 0:
                await asyncio.sleep(0)
            if isinstance(message, Start):
                run = self._runs[message.run] = WorkerRun(message, self.link.outbox)
                run.task = asyncio.get_running_loop().create_task(self._run(run))
            elif (found := self._runs.get(message.run)) is None:
                continue
            elif isinstance(message, LoopAnswer):
                found.receive(message)
            else:
                found.task.cancel()
                del self._runs[message.run]

    async def drop(self) -> None:
        """End all loops, and forget everything."""
        runs, self._runs = list(self._runs.values()), {}
        await cancel_all([run.task for run in runs], "loops of an agent worker")
        self.link.outbox.clear()

    async def pass_on(self) -> None:
        """Send the records of the loops at intervals. Never ends."""
        while True:
            await asyncio.sleep(FREEZE_S)
            sent = 0
            for run in list(self._runs.values()):
                sent += run.send_records()
                if sent >= RECORDS_AT_ONCE:
                    sent = 0
                    await asyncio.sleep(0)

    async def _run(self, run: WorkerRun) -> None:
        result: list[Trajectory] | EvaluatedResponse | SentFailure
        try:
            work = self._host.run_group if run.job.evaluated is None else self._host.respond
            result = await work(run)
        except Exception as error:
            logger.warning("run %d failed", run.number, exc_info=error)
            result = SentFailure.of(error)
        finally:
            self._runs.pop(run.number, None)
        self.link.outbox.put(LoopEnd(run.number, result, run.stats))
