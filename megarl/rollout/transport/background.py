"""Background tasks of the rollout controller, and the failure of one that ends the run."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from megarl.common.errors import RolloutError, clear_text

logger = logging.getLogger(__name__)


LOOK_S = 0.5  # a wait for a change checks for failures and lost replicas this often
# A cancelled task ends in one or two turns of the event loop; one that takes longer ignores its cancellation.
CANCEL_S = 10.0


async def cancel_all(tasks: Iterable[asyncio.Future[Any]], what: str) -> None:
    """Cancel tasks and wait until they have ended. Raises RolloutError if some have not after `CANCEL_S` seconds."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    if not cancelled:
        return
    _, left = await asyncio.wait(cancelled, timeout=CANCEL_S)
    if left:
        raise RolloutError(f"{len(left)} {what} had not ended {CANCEL_S:.0f} s after they were cancelled")


class BackgroundTasks:
    """Starts tasks and keeps the first failure. `changed` is set whenever a task ends."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: RolloutError | None = None

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task; its failure ends the run."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def check(self) -> None:
        """Raise the failure that ended the run, if there is one."""
        if self._failure is not None:
            raise self._failure

    async def await_change(self, left_s: float) -> None:
        """Wait until `changed` is set, LOOK_S at most. Raises TimeoutError after `left_s`."""
        self.changed.clear()
        try:
            async with asyncio.timeout(min(left_s, LOOK_S)):
                await self.changed.wait()
        except TimeoutError:
            if left_s <= LOOK_S:
                raise

    async def drop(self) -> None:
        """Cancel every task, wait until all have ended, and forget the failure. Raises as `cancel_all`."""
        await cancel_all(self._tasks, "tasks of the rollout controller")
        self._failure = None

    def cancel(self) -> None:
        """Cancel every task."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("rollout failed", exc_info=error)
            if self._failure is None:
                if not isinstance(error, RolloutError):
                    error = RolloutError(f"rollout failed: {clear_text(error)}")
                self._failure = error
        self.changed.set()
