"""The parent's side of one process of a tool of a user's class. All of it runs in one thread with an event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

from megarl.common.child_process import ChildProcess
from megarl.common.frames import FrameError, framed, read_frame
from megarl.tools.class_worker import MAX_MESSAGE

GRACE_S = 1.0  # that the wait for an answer is longer than the call


class ToolProcessEndedError(Exception):
    """The process has ended before it answered; the message says how."""


class ToolProcess:
    """A process that answers calls, any number at once.

    `report`: the tool's name, description, parameters and `idempotent`. `ended`: why it answers nothing more.
    """

    def __init__(
        self,
        child: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        report: Mapping[str, Any],
    ) -> None:
        self.report, self.ended = report, ""
        self._child, self._reader, self._writer = child, reader, writer
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._retired = False
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, setup: Mapping[str, Any], timeout_s: float) -> ToolProcess:
        """Start a process and have it make the tool.

        Raises ValueError if it cannot, and TimeoutError if it is not ready within `timeout_s`.
        """
        child = ChildProcess("megarl.tools.class_worker")
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(sock=child.connection)
                writer.write(framed(json.dumps(setup).encode()))
                report = json.loads(await read_frame(reader, MAX_MESSAGE))
            if "problem" in report:
                raise ValueError(report["problem"])
        except TimeoutError as error:
            child.close()
            raise TimeoutError(
                f"a process of the tool {setup['path']!r} was not ready after {timeout_s:g} s"
            ) from error
        except (OSError, EOFError) as error:
            ending = child.ending()
            child.close()
            raise ValueError(f"a process of the tool {setup['path']!r} ended at its start: {ending}") from error
        except BaseException:
            child.close()
            raise
        return cls(child, reader, writer, report)

    async def ask(self, content: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a call and return what it came to.

        Raises TimeoutError if there is no answer within `timeout_s` and a little more, and ToolProcessEndedError.
        """
        if self.ended:
            raise ToolProcessEndedError(self.ended)
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"call": number, "timeout_s": timeout_s, **content})
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await future
        except asyncio.CancelledError:
            if not self.ended:
                self._send({"call": number, "cancel": True})
            raise
        finally:
            del self._open[number]
            self._end_if_retired()

    def retire(self) -> None:
        """End the process as soon as it has no calls; whoever has it makes no new ones."""
        self._retired = True
        self._end_if_retired()

    def kill(self, reason: str) -> None:
        """Kill the process and all that it has started; its calls end with ToolProcessEndedError. May be repeated."""
        if self.ended:
            return
        self.ended = reason
        self._writer.transport.abort()
        self._child.kill()
        for future in self._open.values():
            if not future.done():
                future.set_exception(ToolProcessEndedError(reason))

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(framed(json.dumps(message).encode()))

    def _end_if_retired(self) -> None:
        if self._retired and not self._open:
            self.kill("it was ended after a call that had taken too long")

    async def _read(self) -> None:
        """Hand out answers until the process ends, or sends something else."""
        try:
            while True:
                message = json.loads(await read_frame(self._reader, MAX_MESSAGE))
                future = self._open.get(message["call"])
                if future is not None and not future.done():
                    future.set_result(message)
        except (OSError, EOFError):
            self.kill(self.ended or f"its process ended during the call: {self._child.ending()}")
        except (FrameError, ValueError, KeyError, TypeError) as error:
            self.kill(f"its process gave no proper answer: {type(error).__name__}")
