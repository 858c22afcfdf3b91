"""The program of a process that has a tool of a user's class: `python -m megarl.tools.class_worker FD PARENT_PID`.

Protocol over the inherited socket FD, in JSON: it receives the class's path with its arguments, and answers with the
tool's description or a problem. Then it answers calls, any number at once, each under its number; with `close` instead
of arguments a message closes the tool, and `cancel` gives up the call of that number.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import selectors
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from megarl.common.frames import framed, read_frame
from megarl.common.processes import die_with_parent
from megarl.tools.bounded_text import bounded
from megarl.tools.tool import Tool, ToolAnswer

MAX_MESSAGE = 1 << 24  # bytes
MAX_CHARACTERS = 1_000_000  # of an answer, whose characters have up to 12 bytes in JSON
LATE_S = 0.5  # after its time, when a call is given up here: a tool may tell in its own words that it was too slow


def made(setup: Mapping[str, Any]) -> Tool:
    """Return the tool of the class. Raises ValueError that tells what is wrong with it."""
    module, _, name = setup["path"].partition(":")
    try:
        tool: Tool = getattr(importlib.import_module(module), name)(**setup["kwargs"])
    except Exception as error:
        raise ValueError(f"its class failed with {type(error).__name__}: {error}") from error
    if setup["name"] is not None:
        tool.name = setup["name"]
    missing = [name for name in ("name", "description", "parameters", "idempotent") if not hasattr(tool, name)]
    methods = ("call", "close")
    missing += [f"async {name}" for name in methods if not inspect.iscoroutinefunction(getattr(tool, name, None))]
    if missing:
        raise ValueError(f"its class has no {', '.join(missing)}, which a tool needs (megarl/tools/tool.py)")
    return tool


async def outcome(tool: Tool, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a call, or closing the tool, has come to: an answer, `late`, or `failed` with the exception."""
    own_pid, timeout_s = os.getpid(), message["timeout_s"]
    try:
        async with asyncio.timeout(timeout_s + LATE_S) as limit:
            if "close" in message:
                await tool.close()
                return {}
            answer: object = await tool.call(message["arguments"], timeout_s=timeout_s)
        if not isinstance(answer, ToolAnswer):
            return {"failed": f"TypeError: call has to return a ToolAnswer, not {type(answer).__name__}"}
        return {"text": bounded(answer.text, MAX_CHARACTERS), "error": bool(answer.error)}
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return {"late": True}
        traceback.print_exc()  # into the log: the run tells the last line only
        return {"failed": f"{type(error).__name__}: {error}"[:4000]}
    finally:
        if os.getpid() != own_pid:  # a child that the tool forked, and that came back from it
            os._exit(0)


async def serve(connection: socket.socket) -> None:
    """Receive the setup, then answer calls until the connection is closed."""
    reader, writer = await asyncio.open_connection(sock=connection)
    setup = json.loads(await read_frame(reader, MAX_MESSAGE))
    sys.path += [entry for entry in setup["path_entries"] if entry not in sys.path]
    try:
        tool = made(setup)
        names = ("name", "description", "parameters", "idempotent")
        report = framed(json.dumps({name: getattr(tool, name) for name in names}).encode())
    except BaseException as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        writer.write(framed(json.dumps({"problem": problem[:4000]}).encode()))
        await writer.drain()
        return
    writer.write(report)
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(message: Mapping[str, Any]) -> None:
        try:
            told = await outcome(tool, message)
            writer.write(framed(json.dumps({"call": message["call"], **told}).encode()))
        finally:
            running.pop(message["call"], None)

    while True:
        try:
            message = json.loads(await read_frame(reader, MAX_MESSAGE))
        except (EOFError, OSError):
            return
        number = message["call"]
        if "cancel" in message:
            if number in running:
                running[number].cancel()
            continue
        running[number] = asyncio.create_task(answer(message))


def main() -> None:
    """Serve the inherited socket. Arguments: its descriptor, the parent's pid."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.dup2(2, 1)  # what a tool prints belongs into the log
    os.set_inheritable(descriptor, False)
    connection, selector = socket.socket(fileno=descriptor), selectors.DefaultSelector()

    def in_forked_child() -> None:
        """Leave the connection and the events to the parent, which has the same ones."""
        selector.close()
        connection.close()

    os.register_at_fork(after_in_child=in_forked_child)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
                runner.run(serve(connection))
        except SystemExit as error:
            os._exit(error.code if isinstance(error.code, int) else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os._exit(0)  # threads that a tool started could prevent the interpreter from ending


if __name__ == "__main__":
    main()
