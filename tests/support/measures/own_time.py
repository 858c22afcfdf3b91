"""Time of their own for event loops: it passes only while every task waits, so no machine is too slow for a bound.

It is for what waits in this process alone: for no socket, no other process, and no thread that no loop has started.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

TURN_S = 1e-6  # of each turn of the loop, so that a task which polls without a pause reaches its bound
# While a thread works, time passes this much slower than on the clock: a bound that a test waits for still ends.
SLOWER = 20.0

_monotonic = time.monotonic
_running: asyncio.AbstractEventLoop | None = None
_last = 0.0  # when the latest loop ended: time does not go back from one to the next


class _Waits(selectors.DefaultSelector):
    """Instead of waiting for a timer it moves the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = max(_monotonic(), _last)
        self.threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += TURN_S
        if timeout is None:
            return super().select(None)
        if found := super().select(0):
            return found
        if not self.threads:
            self.now += max(0.0, timeout)
            return []
        began = _monotonic()
        found = super().select(timeout * SLOWER)
        self.now += min(timeout, (_monotonic() - began) / SLOWER)
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.waits = _Waits()
        super().__init__(self.waits)

    def time(self) -> float:
        return self.waits.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.waits.threads += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Any) -> None:
        self.waits.threads -= 1


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.run` does, in a time of its own."""
    global _running, _last
    with asyncio.Runner(loop_factory=_Loop) as runner:
        _running = runner.get_loop()
        try:
            return runner.run(coroutine)
        finally:
            _running, _last = None, _running.time()


def now() -> float:
    """Return the seconds of the running loop's time; without one, those of the clock, but not less than before."""
    return max(_monotonic(), _last) if _running is None else _running.time()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `asyncio.run` be `run`, and `time.monotonic` be `now`, until the end of a test."""
    monkeypatch.setattr(asyncio, "run", run)
    monkeypatch.setattr(time, "monotonic", now)
