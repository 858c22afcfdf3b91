"""The controller's connection to one agent worker: one call gives it messages, another one waits for its news.

At most one call of each kind is under way, so messages arrive in their order, and those that come while a call is under
way share the next one. A call that may have been lost is repeated, and counts once. A worker that has died, or does not
answer in time, is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from megarl.common.errors import RolloutError
from megarl.rollout.transport.actor_errors import fate_of_actor, own_text
from megarl.rollout.transport.gather import Outbox
from megarl.rollout.workers.messages import ToWorker, WorkerReport

logger = logging.getLogger(__name__)

POLL_S = 2.0  # the longest time for which a worker without news lets the controller wait
RETRY_S = 0.5


class WorkerActor(Protocol):
    """The methods of an agent worker's actor; each has `remote`, which returns an awaitable."""

    give: Any
    take: Any
    drop: Any
    shutdown: Any


class WorkerLost(RolloutError):  # noqa: N818
    """An agent worker has died, or does not answer."""


class WorkerClient:
    """Sends messages to a worker and hands its news on, from `open` to `close` or to its loss."""

    def __init__(
        self,
        index: int,
        actor: WorkerActor,
        rpc_s: float,
        receive: Callable[[WorkerReport], Awaitable[None]],
        lost: Callable[[WorkerClient, WorkerLost], None],
        loops: Callable[[], int] = int,
    ) -> None:
        """`rpc_s`: how long an answer may be late. `lost` is called once, with what has happened.

        `loops`: the number of loops that the worker runs.
        """
        self.index, self.actor = index, actor
        self.waiting = ""  # see `WorkerReport`
        self._rpc_s, self._receive, self._lost = rpc_s, receive, lost
        self._outbox: Outbox[ToWorker] = Outbox(loops)
        self._given = 0
        self._giving = asyncio.Lock()
        self._drops = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._is_lost = False

    def open(self) -> None:
        """Begin to send and to receive."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watched(each)) for each in (self._give, self._take)]

    def close(self) -> None:
        """Send and receive nothing more."""
        for task in self._tasks:
            task.cancel()

    def send(self, message: ToWorker) -> None:
        """Send a message soon."""
        self._outbox.put(message)

    async def drop(self) -> None:
        """Have the worker forget all groups, and what was to be sent. One that cannot do that in time is lost."""
        try:
            async with self._giving:  # nothing that was sent before arrives later
                self._drops += 1
                self._outbox.clear()
                await self._call("drop", limit_s=self._rpc_s)
        except WorkerLost as error:
            self._lose(error)

    async def _watched(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except WorkerLost as error:
            self._lose(error)
        except Exception as error:
            logger.exception("agent worker %d", self.index)
            self._lose(WorkerLost(f"the news of agent worker {self.index} cannot be read: {error!r}"))

    def _lose(self, error: WorkerLost) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.close()
            self._lost(self, error)

    async def _give(self) -> None:
        while True:
            messages, drops = await self._outbox.take(POLL_S), self._drops
            async with self._giving:
                if messages and drops == self._drops:
                    self._given += 1
                    await self._call("give", self._given, messages, limit_s=self._rpc_s)

    async def _take(self) -> None:
        seen = 0
        while True:
            report: WorkerReport = await self._call("take", seen, POLL_S, limit_s=POLL_S + self._rpc_s)
            if report.number != seen:
                seen, self.waiting = report.number, report.waiting
                await self._receive(report)

    async def _call(self, method: str, *args: object, limit_s: float) -> Any:  # noqa: ANN401  # of any method
        """Call a method of the actor, again while it cannot be reached. Raises WorkerLost after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()) as limit:
                    return await getattr(self.actor, method).remote(*args)
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    waited = f"the controller waited {limit_s:.0f} s for agent worker {self.index} to {method}"
                    raise WorkerLost(waited) from None
                if fate_of_actor(error) != "cut":
                    what = f"{type(error).__name__}: {own_text(error)}"
                    raise WorkerLost(f"agent worker {self.index} has failed: {what}") from error
            logger.warning("agent worker %d cannot be reached and is asked again", self.index)
            await asyncio.sleep(RETRY_S)
