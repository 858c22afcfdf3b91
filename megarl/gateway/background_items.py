"""Takes the items of an asynchronous generator that runs in a task of its own, with a bound on each wait.

All steps of the generator run in that one task, so its time-outs and clean-up work as in a coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

END = object()  # the generator has ended
LATE = object()  # nothing has come in time; the generator goes on


class Items:
    """The items that a generator has made and nobody has taken."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    async def next(self, timeout_s: float | None) -> Any:  # noqa: ANN401  # what the generator makes
        """Return the next item, END, or LATE after `timeout_s`. Raises what the generator raised."""
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            return LATE
        if isinstance(item, Exception):
            raise item
        return item

    async def take_all(self, generator: AsyncGenerator[Any, None]) -> None:
        """Run a generator to its end."""
        try:
            async for item in generator:
                self._queue.put_nowait(item)
        except Exception as error:
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(END)
        finally:
            await generator.aclose()


@asynccontextmanager
async def background_items(generator: AsyncGenerator[Any, None]) -> AsyncIterator[Items]:
    """Give the items of a generator, which has ended, or is closed, when the block has."""
    items = Items()
    task = asyncio.create_task(items.take_all(generator))
    try:
        yield items
    finally:
        task.cancel()
        await asyncio.wait({task})
