"""The program of a process that runs a user's tool: `python -m megarl.tools.function_worker FD PARENT_PID`.

Protocol over the inherited socket FD: it receives a JSON object with the function's path, its bound arguments and the
limits, and answers with the tool's description or a problem. Then it answers each JSON object of arguments with a JSON
object of `text` and `error`, one at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from megarl.common.frames import receive_frame, send_frame
from megarl.common.processes import die_with_parent
from megarl.common.secret_references import resolved
from megarl.tools.bounded_text import bounded
from megarl.tools.function_schema import DescribedFunction, describe, import_function

MAX_MESSAGE = 1 << 24


def answer(
    tool: DescribedFunction, bound: Mapping[str, Any], arguments: Mapping[str, Any], limit: int
) -> dict[str, Any]:
    """Call the function; any exception of it is an answer."""
    try:
        checked = tool.checked(arguments)
    except ValueError as error:
        return {"text": bounded(f"error: {error}", limit), "error": True}
    try:
        value = tool.function(**checked, **bound)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"text": bounded(text, limit), "error": False}
    except BaseException as error:
        traceback.print_exc()  # into the log: the model sees only the last line
        return {"text": bounded(f"error: {type(error).__name__}: {error}", limit), "error": True}


async def _awaited(value: Any) -> object:  # noqa: ANN401  # whatever an async function returns
    return await value


def serve(connection: socket.socket) -> None:
    """Receive the setup, then answer calls until the connection is closed."""
    setup = json.loads(receive_frame(connection, MAX_MESSAGE))
    own_pid = os.getpid()
    sys.path += [entry for entry in setup["path"] if entry not in sys.path]
    if setup["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (setup["memory_bytes"], setup["memory_bytes"]))
    try:
        bound = resolved(setup["kwargs"], "the tool's kwargs")
        tool = describe(setup["function"], import_function(setup["function"]), bound)
        report = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    except BaseException as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        send_frame(connection, json.dumps({"problem": problem[:4000]}).encode())
        return
    send_frame(connection, json.dumps(report).encode())
    while True:
        try:
            arguments = json.loads(receive_frame(connection, MAX_MESSAGE))
        except (EOFError, ConnectionResetError):
            return
        told = answer(tool, bound, arguments, setup["max_characters"])
        if os.getpid() != own_pid:  # a child that the function forked, and that came back from it
            os._exit(0)
        send_frame(connection, json.dumps(told).encode())


def main() -> None:
    """Serve the inherited socket. Arguments: its descriptor, the parent's pid."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.dup2(2, 1)  # what a function prints belongs into the log
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        os.register_at_fork(after_in_child=connection.close)
        serve(connection)
    os._exit(0)  # threads that a function started could prevent the interpreter from ending


if __name__ == "__main__":
    main()
