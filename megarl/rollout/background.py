"""Tasks of the rollout controller that nobody awaits, and the failure of one that ends the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from megarl.common.errors import RolloutError, clear_text

logger = logging.getLogger(__name__)


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

    async def drop(self) -> None:
        """Cancel every task, wait until all have ended, and forget the failure."""
        tasks = list(self._tasks)
        self.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
