"""A tool of a user's class, whose object is in a process of its own: it can be killed when a call hangs.

The process belongs to a thread with an event loop, because the kernel kills it when that thread ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from megarl.tools.class_process import GRACE_S, ToolProcess, ToolProcessEndedError
from megarl.tools.tool import ToolAnswer

CLOSE_S = 5.0  # in which the object may close what it has
JOIN_S = 10.0

WorkResult = TypeVar("WorkResult")


class ToolRaisedError(RuntimeError):
    """The user's class has raised an exception; the message names it."""


class ClassTool:
    """The object of the class at the import path `path`, in one process that answers all calls.

    A call that does not end in time is an error, and its process is killed with all that it has started: at once if it
    answers nothing, else as soon as its other calls have ended. So is one whose process ends by itself. The next call
    has a new object in a new process, and what the old one kept is lost. A call that was open when the process ended is
    repeated once if the tool is `idempotent`, else it is an error, because it may have been done.

    `kwargs`: arguments of the class. Raises ValueError if the class is no tool, and TimeoutError if the process is not
    ready within `start_timeout_s`.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._start_timeout_s = start_timeout_s
        paths = [entry or os.getcwd() for entry in sys.path]
        self._setup = {"path": path, "name": name, "kwargs": dict(kwargs or {}), "path_entries": paths}
        self._processes: set[ToolProcess] = set()
        self._current: ToolProcess | None = None
        self._starting: asyncio.Future[ToolProcess] | None = None
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"megarl-tool-{path}", daemon=True)
        self._thread.start()
        try:
            report = self._wait_for(self._process(), start_timeout_s + JOIN_S).report
        except BaseException:
            self._end()
            raise
        self.name: str = report["name"]
        self.description: str = report["description"]
        self.parameters: dict[str, Any] = report["parameters"]
        self.idempotent: bool = report["idempotent"]

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Call the object. Raises ToolRaisedError if it raises: that is a mistake in the tool, not the model's."""
        with self._lock:
            if self._closed:
                return self._error("it is closed")
            future = asyncio.run_coroutine_threadsafe(self._answer(dict(arguments), timeout_s), self._loop)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Have the object close what it has, and kill its processes. Raises ToolRaisedError if the object raises."""
        await asyncio.to_thread(self._end)

    def _wait_for(self, work: Coroutine[Any, Any, WorkResult], timeout_s: float) -> WorkResult:
        """Run a coroutine in the thread of the processes; raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _end(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._wait_for(self._end_processes(), CLOSE_S + JOIN_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _end_processes(self) -> None:
        process, failed = self._current, None
        if process is not None:
            with contextlib.suppress(TimeoutError, ToolProcessEndedError):  # it is killed in any case
                failed = (await process.ask({"close": True}, CLOSE_S)).get("failed")
        for each in list(self._processes):
            each.kill("it was closed")
        if self._starting is not None:
            self._starting.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        if failed:
            raise ToolRaisedError(failed)

    async def _answer(self, arguments: dict[str, Any], timeout_s: float) -> ToolAnswer:
        """Answer one call, in the thread of the processes."""
        deadline, repeated = self._loop.time() + timeout_s, False
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    process = await self._process()
            except TimeoutError:
                return self._error(f"its process was not ready in {timeout_s:g} s")
            except (ValueError, OSError) as error:
                return self._error(f"its process does not start: {error}")
            try:
                told = await process.ask({"arguments": arguments}, max(0.01, deadline - self._loop.time()))
            except TimeoutError:
                process.kill("its process was killed, because another call of it did not end in time")
                return self._error(f"it did not answer in {timeout_s:g} s and was killed")
            except ToolProcessEndedError as ended:
                if self.idempotent and not repeated and deadline - self._loop.time() > GRACE_S:
                    repeated = True
                    continue
                return self._error(str(ended))
            if "late" in told:
                self._current = None if self._current is process else self._current
                process.retire()
                return self._error(f"it did not answer in {timeout_s:g} s")
            if "failed" in told:
                raise ToolRaisedError(told["failed"])
            return ToolAnswer(told["text"], told["error"])

    async def _process(self) -> ToolProcess:
        """Return the process that answers calls; start one if there is none. Raises what `ToolProcess.start` raises."""
        if self._closed:
            raise ValueError("it is closed")
        if self._current is not None and not self._current.ended:
            return self._current
        if self._starting is None:
            self._starting = asyncio.ensure_future(ToolProcess.start(self._setup, self._start_timeout_s))
            self._starting.add_done_callback(self._started)
        return await asyncio.shield(self._starting)

    def _started(self, starting: asyncio.Future[ToolProcess]) -> None:
        self._starting = None
        if starting.cancelled() or starting.exception() is not None:
            return
        self._current = starting.result()
        self._processes = {each for each in self._processes if not each.ended} | {self._current}
        if self._closed:
            self._current.kill("it was closed")

    def _error(self, message: str) -> ToolAnswer:
        return ToolAnswer(f"error: {self.name}: {message}", error=True)
