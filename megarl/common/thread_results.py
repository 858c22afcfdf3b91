"""Awaits futures that other threads complete; those that end between two looks of the event loop share one wake-up.

`asyncio.wrap_future` wakes the event loop for each future, which costs it more than most of their results.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class ThreadResults:
    """Brings results of threads to the event loop that awaits them; any number of loops may use one object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    async def of(self, future: Future[T]) -> T:
        """Return the result of `future`, or raise its exception. Cancels it if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(lambda _: self._note(loop, ended))
        try:
            await ended
        except asyncio.CancelledError:
            future.cancel()
            raise
        if future.cancelled():
            raise asyncio.CancelledError
        return future.result()

    def _note(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        """Wake the loop up, unless that is under way already. Any thread calls this."""
        with self._lock:
            waiting = self._ended.setdefault(loop, [])
            waiting.append(ended)
            if len(waiting) > 1 or loop.is_closed():
                return
        loop.call_soon_threadsafe(self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            waiting = self._ended.pop(loop)
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)
