"""A user's function as a tool, in processes that are reused between calls and killed when a call takes too long.

Each process belongs to one thread of this process, because the kernel kills it when that thread ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl.common.byte_units import GIB
from megarl.common.child_process import ChildProcess
from megarl.common.frames import FrameError, receive_frame, send_frame
from megarl.tools.bounded_text import MAX_CHARACTERS
from megarl.tools.tool import ToolAnswer

GRACE_S = 1.0  # that the wait for a call's thread is longer than the call itself
_MAX_ANSWER = 1 << 24
_NONE_FREE = "error: {name}: none of its {count} processes became free in {seconds:g} s"


class UserFunctionTool:
    """The function at the import path `function`, in `processes` processes.

    `kwargs`: arguments that are bound, and that the model does not see; `{env: NAME}` for a secret. `memory_gib`: what
    each process may allocate; None: no limit. `idempotent`: whether the function may be called again for a call whose
    answer was lost. Raises ValueError if the function cannot be a tool, and TimeoutError if a process is not ready
    within `start_timeout_s`.
    """

    def __init__(
        self,
        function: str,
        *,
        name: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        processes: int = 1,
        idempotent: bool = False,
        memory_gib: float | None = 4.0,
        start_timeout_s: float = 120.0,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        if processes < 1:
            raise ValueError(f"the tool function {function!r} needs at least one process, not {processes}")
        self._function, self._start_timeout_s, self._processes = function, start_timeout_s, processes
        self._setup = {
            "function": function,
            "kwargs": dict(kwargs or {}),
            "memory_bytes": None if memory_gib is None else int(memory_gib * GIB),
            "max_characters": max_characters,
            "path": [entry or os.getcwd() for entry in sys.path],
        }
        self._own = threading.local()
        self._lock = threading.Lock()
        self._children: set[ChildProcess] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(processes, f"megarl-tool-{function}")
        try:
            report = self._threads.submit(self._child).result()[1]
        except BaseException:
            self._end()
            raise
        self.name: str = name or report["name"]
        self.description: str = report["description"]
        self.parameters: dict[str, Any] = report["parameters"]
        self.idempotent = idempotent

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Call the function; a call that does not end in time is an error, and its process is killed."""
        deadline = time.monotonic() + timeout_s
        running: list[ChildProcess] = []
        try:
            future = self._threads.submit(self._call, dict(arguments), deadline, timeout_s, running)
        except RuntimeError:
            return ToolAnswer(f"error: {self.name} is closed", error=True)
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            return ToolAnswer(_NONE_FREE.format(name=self.name, count=self._processes, seconds=timeout_s), error=True)
        except asyncio.CancelledError:
            for child in running:
                child.kill()
            raise

    async def close(self) -> None:
        """Kill the processes."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            children = list(self._children)
        for child in children:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in children:
            child.close()

    def _call(
        self, arguments: dict[str, Any], deadline: float, timeout_s: float, running: list[ChildProcess]
    ) -> ToolAnswer:
        """Run one call, in the thread that owns the process."""
        if deadline <= time.monotonic():
            return ToolAnswer(_NONE_FREE.format(name=self.name, count=self._processes, seconds=timeout_s), error=True)
        try:
            child = self._child()[0]
        except (ValueError, OSError, EOFError, FrameError) as error:
            return ToolAnswer(f"error: {self.name}: its process does not start: {error}", error=True)
        running.append(child)
        try:
            send_frame(child.connection, json.dumps(arguments).encode(), max(0.01, deadline - time.monotonic()))
            answer = json.loads(receive_frame(child.connection, _MAX_ANSWER, max(0.01, deadline - time.monotonic())))
            return ToolAnswer(str(answer["text"]), bool(answer["error"]))
        except TimeoutError:
            text = f"error: {self.name} did not answer in {timeout_s:g} s and was killed"
        except (OSError, EOFError):
            text = f"error: the process of {self.name} ended during the call: {child.ending()}"
        except (FrameError, ValueError, KeyError, TypeError) as error:
            text = f"error: {self.name} gave no proper answer: {type(error).__name__}"
        finally:
            running.clear()
        self._drop(child)
        return ToolAnswer(text, error=True)

    def _child(self) -> tuple[ChildProcess, dict[str, Any]]:
        """Return this thread's process and its description of the tool; start one if there is none."""
        own: tuple[ChildProcess, dict[str, Any]] | None = getattr(self._own, "child", None)
        if own is not None:
            return own
        with self._lock:
            if self._closed:
                raise ValueError("it is closed")
            child = ChildProcess("megarl.tools.function_worker")
            self._children.add(child)
        try:
            deadline = time.monotonic() + self._start_timeout_s
            send_frame(child.connection, json.dumps(self._setup).encode(), self._start_timeout_s)
            report = json.loads(receive_frame(child.connection, _MAX_ANSWER, max(0.01, deadline - time.monotonic())))
        except TimeoutError as error:
            self._drop(child)
            raise TimeoutError(
                f"a process of the tool function {self._function!r} was not ready after {self._start_timeout_s:g} s"
            ) from error
        except (OSError, EOFError) as error:
            ending = child.ending()
            self._drop(child)
            raise ValueError(
                f"a process of the tool function {self._function!r} ended at its start: {ending}"
            ) from error
        if "problem" in report:
            self._drop(child)
            raise ValueError(report["problem"])
        self._own.child = (child, report)
        return child, report

    def _drop(self, child: ChildProcess) -> None:
        """Kill a process; the thread's next call starts another one."""
        self._own.child = None
        child.close()
        with self._lock:
            self._children.discard(child)
