"""Calls in threads, and their results: for whoever waits in a thread, and for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_thread(function: Callable[..., T], *args: object, name: str | None = None) -> Future[T]:
    """Call `function` in a thread called `name`. The future, which cannot be cancelled, has its result or exception.

    It is a daemon thread, unlike those of an executor: a process that ends does not wait for a call that hangs. The
    call must have a deadline of its own, or whoever waits for the future one.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class ThreadResults:
    """Brings results of threads to the event loop that awaits them; any number of loops may use one object.

    Those that end between two looks of the loop share one wake-up: `asyncio.wrap_future` wakes it up for each, which
    costs more than most results.
    """

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
