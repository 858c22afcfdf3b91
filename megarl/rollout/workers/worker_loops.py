"""All loops of an agent worker: takes the controller's messages, and keeps the news until the controller takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megarl.config.schema import Config
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.batch_decoder import BatchDecoder
from megarl.rollout.transport.gather import Outbox
from megarl.rollout.workers.messages import StartGroup, StartResponse, ToController, ToWorker, WorkerReport
from megarl.rollout.workers.worker_runs import LoopParts, WorkerGroup, WorkerResponse, WorkerRun

FREEZE_S = 0.5  # by which the controller's records of the loops may be behind
SLICE = 8  # messages that are handled at once: each lets a loop go on, which computes for about a millisecond
ENCODED_AT_ONCE = 64  # records, between which other tasks run


class WorkerLoops:
    """Runs groups, and responses of evaluations."""

    def __init__(self, config: Config, partition: str, parts: LoopParts) -> None:
        """`partition`: that of the queue; it makes request ids unique."""
        self._config, self._partition, self._parts = config, partition, parts
        self._decoder = BatchDecoder(parts.decode_all, config.timeouts.rpc_s)
        self._runs: dict[int, WorkerRun] = {}
        self._loops = 0  # of all runs together
        self._outbox: Outbox[ToController] = Outbox(self.under_way)
        self._given = 0  # the number of the last call of `give`
        self._report = WorkerReport(0)
        self._taking = asyncio.Lock()

    def under_way(self) -> int:
        """Return the number of loops that run."""
        return self._loops

    async def give(self, number: int, messages: Sequence[ToWorker]) -> None:
        """Take messages of the controller. `number`: of the call; one that was made twice counts once."""
        if number <= self._given:
            return
        self._given = number
        for count, message in enumerate(messages):
            if count % SLICE == 0:  # each of them lets loops go on
                await asyncio.sleep(0)
            if isinstance(message, StartGroup | StartResponse):
                self._start(message)
            elif (run := self._runs.get(message.run)) is not None:
                run.receive(message)

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
        """Forget everything. When this returns, no row is on its way to the queue."""
        runs, self._runs, self._loops = list(self._runs.values()), {}, 0
        await cancel_all([task for run in runs for task in run.tasks], "loops of an agent worker")
        await self._parts.writer.settle()
        self._outbox.clear()

    async def pass_on(self) -> None:
        """Send the records of the loops at intervals. Never ends."""
        while True:
            await asyncio.sleep(FREEZE_S)
            encoded = 0
            for run in list(self._runs.values()):
                encoded += run.send_records()
                if encoded >= ENCODED_AT_ONCE:
                    encoded = 0
                    await asyncio.sleep(0)

    def _start(self, start: StartGroup | StartResponse) -> None:
        run: WorkerRun
        if isinstance(start, StartGroup):
            run = WorkerGroup(start, self._config, self._partition, self._parts, self._decoder, self._outbox)
        else:
            run = WorkerResponse(start, self._parts, self._outbox)
        self._runs[start.run] = run
        self._loops += run.loops
        run.begin(self._forget)

    def _forget(self, run: WorkerRun) -> None:
        if self._runs.pop(run.number, None) is not None:
            self._loops -= run.loops
