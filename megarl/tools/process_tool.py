"""A tool from a user's class or function, in its own processes, which can be killed when a call hangs.

One thread with an event loop runs everything, because the kernel kills a process when the thread that made it ends.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from megarl.common.process.child_process import AnswerError, ChildProcess, StartError, checked_answer
from megarl.common.process.frames import FrameError, framed, read_frame
from megarl.common.values import GIB
from megarl.tools.process_worker import MAX_MESSAGE
from megarl.tools.tool import MAX_CHARACTERS, ToolAnswer

GRACE_S = 1.0  # how much longer than the call to wait for the answer of an object
CLOSE_S = 5.0  # for the object to close its resources
JOIN_S = 10.0

WorkResult = TypeVar("WorkResult")


class ToolRaisedError(RuntimeError):
    """The user's class raised an exception, which the message names."""


class ProcessEndedError(Exception):
    """The process ended before it answered; the message says how."""


@dataclass(frozen=True)
class ToolReport:
    """The description of a tool, as its process sends it."""

    name: str
    description: str
    parameters: dict[str, Any]
    idempotent: bool = False


@dataclass(frozen=True)
class CallOutcome:
    """How a call ended: with an answer, too late, or with an exception of the object."""

    call: int
    text: str = ""
    error: bool = False
    late: bool = False
    failed: str = ""
    images: tuple[str, ...] = ()  # in base64


_REPORT, _OUTCOME = TypeAdapter(ToolReport), TypeAdapter(CallOutcome)


class ToolProcess:
    """A process that answers calls once it has reported. `ended`: why it no longer answers.

    `report`: the description of its tool, or what `ChildProcess.handshake` raises. `retired`: it gets no more calls,
    and ends with those that it has.
    """

    def __init__(self, setup: Mapping[str, Any], timeout_s: float) -> None:
        """Start it; it has `timeout_s` to report."""
        self.ended, self.retired = "", False
        self._alone: bool = setup["is_function"]
        self._child = ChildProcess("megarl.tools.process_worker", f"a process of the tool {setup['path']!r}")
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[CallOutcome]] = {}
        self.report = asyncio.ensure_future(self._start(json.dumps(setup).encode(), timeout_s))
        self.report.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody else reads it

    async def _start(self, setup: bytes, timeout_s: float) -> ToolReport:
        greeting = asyncio.ensure_future(asyncio.to_thread(self._child.handshake, setup, timeout_s))
        try:
            report = _REPORT.validate_python(await asyncio.shield(greeting))
            reader, self._writer = await asyncio.open_connection(sock=self._child.connection)
        except BaseException as error:
            self.ended = self.ended or "it did not start"
            self._child.kill()
            await asyncio.wait([greeting], timeout=GRACE_S)  # so that nothing reads from a closed connection
            self._child.close()
            if isinstance(error, asyncio.CancelledError):
                raise StartError(self.ended) from error
            if isinstance(error, ValidationError):
                raise ValueError(f"it is not a tool: {error.errors()[0]['loc'][-1]} is wrong or missing") from error
            raise
        self._reading = asyncio.ensure_future(self._read(reader))
        return report

    async def ask(self, content: Mapping[str, Any], timeout_s: float, grace_s: float = GRACE_S) -> CallOutcome:
        """Send a call and return its outcome.

        Raises TimeoutError without an answer within `timeout_s` plus `grace_s`, and ProcessEndedError.
        """
        if self.ended:
            raise ProcessEndedError(self.ended)
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"call": number, "timeout_s": timeout_s, **content})
            async with asyncio.timeout(timeout_s + grace_s):
                return await future
        except asyncio.CancelledError:
            if self._alone:
                self.kill("its call was cancelled")
            elif not self.ended:
                self._send({"call": number, "cancel": True})
            raise
        finally:
            del self._open[number]
            self._end_if_retired()

    def retire(self) -> None:
        """End the process once it has no calls."""
        self.retired = True
        self._end_if_retired()

    def kill(self, reason: str) -> None:
        """Kill the process and everything it started; its calls end with ProcessEndedError. Idempotent."""
        if self.ended:
            return
        self.ended = reason
        if not self.report.done():
            self.report.cancel()
            return
        self._writer.transport.abort()
        self._child.kill()
        for future in self._open.values():
            if not future.done():
                future.set_exception(ProcessEndedError(reason))

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(framed(json.dumps(message).encode()))

    def _end_if_retired(self) -> None:
        if self.retired and not self._open:
            self.kill("it was ended after a call that took too long")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver answers until the process ends or sends something else."""
        try:
            while True:
                outcome = checked_answer(await read_frame(reader, MAX_MESSAGE), _OUTCOME)
                future = self._open.get(outcome.call)
                if future is not None and not future.done():
                    future.set_result(outcome)
        except (OSError, EOFError):
            self.kill(self.ended or f"its process ended during the call: {self._child.ending()}")
        except (FrameError, AnswerError) as error:
            self.kill(f"its process sent {error}")


class ProcessTool:
    """A tool in `processes` processes, with one call at a time each (a function) or any number (an object).

    A call that does not end in time is an error, and its process is killed with everything it started: at once if it
    answers nothing, else once its other calls have ended. The next call gets a new process, and an object's state is
    lost. If a call's process ends by itself, the call is repeated once if the tool is `idempotent`. Otherwise it is an
    error, because it may have had an effect.

    Raises ValueError if it is not a tool, TimeoutError if a process is not ready within `start_timeout_s`, and
    StartError.
    """

    def __init__(self, setup: Mapping[str, Any], *, processes: int, start_timeout_s: float) -> None:
        """`setup`: by `function_tool` or `class_tool`."""
        search = [entry or os.getcwd() for entry in sys.path]
        self._setup, self._start_timeout_s = {**setup, "search": search}, start_timeout_s
        self._path, self._alone = setup["path"], setup["is_function"]
        self._current: list[ToolProcess | None] = [None] * processes
        self._all: set[ToolProcess] = set()  # including retired ones
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"megarl-tool-{self._path}", daemon=True)
        self._thread.start()
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for place in range(processes):
            self._free.put_nowait(place)
        try:
            report = self._wait_for(self._report(), start_timeout_s + JOIN_S)
        except BaseException:
            self._end()
            raise
        self.name: str = setup["name"] or report.name
        self.description, self.parameters = report.description, report.parameters
        self.idempotent: bool = setup["idempotent"] or report.idempotent

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Call the tool. Raises ToolRaisedError if an object raises, which is the tool's mistake, not the model's."""
        with self._lock:
            if self._closed:
                return self._error("it is closed")
            future = asyncio.run_coroutine_threadsafe(self._answer(dict(arguments), timeout_s), self._loop)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Let the object close its resources, and kill the processes. Raises ToolRaisedError if the object raises."""
        await asyncio.to_thread(self._end)

    async def _report(self) -> ToolReport:
        return await asyncio.shield(self._process(0).report)

    def _process(self, place: int) -> ToolProcess:
        """Return the process at a place, replaced if it has ended. Raises ValueError if the tool is closed."""
        if self._closed:
            raise ValueError("it is closed")
        process = self._current[place]
        if process is None or process.ended or process.retired:
            process = self._current[place] = ToolProcess(self._setup, self._start_timeout_s)
            self._all = {each for each in self._all if not each.ended} | {process}
        return process

    def _wait_for(self, work: Coroutine[Any, Any, WorkResult], timeout_s: float) -> WorkResult:
        """Run a coroutine in the thread of the processes. Raises TimeoutError."""
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
        process, failed = self._current[0], ""
        if process is not None and not process.ended and process.report.done() and not self._alone:
            with contextlib.suppress(TimeoutError, ProcessEndedError):  # it is killed anyway
                failed = (await process.ask({"close": True}, CLOSE_S)).failed
        for each in self._all:
            each.kill("it was closed")
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=2 * GRACE_S)
        if failed:
            raise ToolRaisedError(failed)

    async def _answer(self, arguments: dict[str, Any], timeout_s: float) -> ToolAnswer:
        """Answer one call, in the thread of the processes."""
        deadline = self._loop.time() + timeout_s
        if not self._alone:
            return await self._answer_by(0, arguments, timeout_s, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                place = await self._free.get()
        except TimeoutError:
            return self._error(f"none of its {len(self._current)} processes became free in {timeout_s:g} s")
        try:
            return await self._answer_by(place, arguments, timeout_s, deadline)
        finally:
            self._free.put_nowait(place)

    async def _answer_by(self, place: int, arguments: dict[str, Any], timeout_s: float, deadline: float) -> ToolAnswer:
        repeated, grace_s = False, 0.0 if self._alone else GRACE_S
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    process = self._process(place)
                    await asyncio.shield(process.report)
            except TimeoutError:
                return self._error(f"its process was not ready in {timeout_s:g} s")
            except (ValueError, OSError, StartError) as error:
                return self._error(f"its process does not start: {error}")
            try:
                left_s = max(0.01, deadline - self._loop.time())
                outcome = await process.ask({"arguments": arguments}, left_s, grace_s)
            except TimeoutError:
                process.kill("its process was killed, because another call of it did not end in time")
                return self._error(f"it did not answer in {timeout_s:g} s and was killed")
            except ProcessEndedError as ended:
                if self.idempotent and not repeated and deadline - self._loop.time() > GRACE_S:
                    repeated = True
                    continue
                return self._error(str(ended))
            if outcome.late:
                process.retire()
                return self._error(f"it did not answer in {timeout_s:g} s")
            if outcome.failed:
                raise ToolRaisedError(outcome.failed)
            return ToolAnswer(outcome.text, outcome.error, tuple(map(base64.b64decode, outcome.images)))

    def _error(self, message: str) -> ToolAnswer:
        return ToolAnswer(f"error: {self.name}: {message}", error=True)


def class_tool(
    path: str, *, name: str | None = None, kwargs: Mapping[str, Any] | None = None, start_timeout_s: float = 120.0
) -> ProcessTool:
    """Return a tool from the class at an import path, in one process that answers all calls.

    `kwargs`: arguments of the class. Raises as `ProcessTool`.
    """
    setup = {"path": path, "name": name, "kwargs": dict(kwargs or {}), "is_function": False, "memory_bytes": None}
    return ProcessTool({**setup, "idempotent": False}, processes=1, start_timeout_s=start_timeout_s)


def function_tool(
    function: str,
    *,
    name: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    processes: int = 1,
    idempotent: bool = False,
    memory_gib: float | None = 4.0,
    start_timeout_s: float = 120.0,
    max_characters: int = MAX_CHARACTERS,
) -> ProcessTool:
    """Return a tool from the function at an import path, in `processes` processes with one call at a time each.

    `kwargs`: bound arguments that the model does not see; `{env: NAME}` for a secret. `memory_gib`: what each process
    may allocate; None: no limit. `idempotent`: whether a call may be repeated if its answer was lost. Raises as
    `ProcessTool`.
    """
    if processes < 1:
        raise ValueError(f"the tool function {function!r} needs at least one process, not {processes}")
    setup = {
        "path": function,
        "name": name,
        "kwargs": dict(kwargs or {}),
        "is_function": True,
        "idempotent": idempotent,
        "memory_bytes": None if memory_gib is None else int(memory_gib * GIB),
        "max_characters": max_characters,
    }
    return ProcessTool(setup, processes=processes, start_timeout_s=start_timeout_s)
