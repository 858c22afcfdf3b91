"""The program of a process with a user's tool (`megarl.common.process.child_program`), with messages in JSON.

The setup names a class or a function. An object of the class answers any number of numbered calls at once; a message
with `close` closes it, and one with `cancel` cancels a call. A function answers one call after the other, outside any
event loop.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import os
import selectors
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from megarl.common.imports import imported
from megarl.common.process.child_program import PROBLEM_CHARACTERS, ChildProgram, json_bytes, prepare
from megarl.common.process.frames import framed, read_frame
from megarl.common.trust.secret_references import resolved
from megarl.tools.tool import Tool, ToolAnswer, answer_of, bounded

MAX_MESSAGE = 1 << 26  # bytes
MAX_CHARACTERS = 1_000_000  # of an answer; a character has up to 12 bytes in JSON
LATE_S = 0.5  # a call is cancelled this long after its time, so that the tool can report by itself that it is late
_OF_TOOL = ("name", "description", "parameters", "idempotent")


def made(path: str, name: str | None, kwargs: Mapping[str, Any]) -> Tool:
    """Return the tool of the class at an import path. Raises ValueError with what is wrong with it."""
    module, _, attribute = path.partition(":")
    try:
        tool: Tool = getattr(importlib.import_module(module), attribute)(**kwargs)
    except Exception as error:
        raise ValueError(f"its class failed with {type(error).__name__}: {error}") from error
    if name is not None:
        tool.name = name
    missing = [each for each in _OF_TOOL if not hasattr(tool, each)]
    missing += [
        f"async {each}" for each in ("call", "close") if not inspect.iscoroutinefunction(getattr(tool, each, None))
    ]
    if missing:
        raise ValueError(f"its class has no {', '.join(missing)}, which a tool needs (megarl/tools/tool.py)")
    return tool


def reported(program: ChildProgram, setup: Mapping[str, Any]) -> Tool | DescribedFunction | None:
    """Make the tool and send its description; if that fails, send the problem and return None."""
    try:
        tool: Tool | DescribedFunction
        if setup["is_function"]:
            bound = resolved(setup["kwargs"], "the tool's kwargs")
            tool = describe(setup["path"], import_function(setup["path"]), bound)
        else:
            tool = made(setup["path"], setup["name"], setup["kwargs"])
        report = json_bytes({name: getattr(tool, name) for name in _OF_TOOL})
    except BaseException as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        program.send(json_bytes({"problem": problem[:PROBLEM_CHARACTERS]}))
        return None
    program.send(report)
    return tool


@dataclass(frozen=True)
class DescribedFunction:
    """A function, its name and description for the model, and its arguments as a pydantic model.

    `bound`: more arguments, which the model does not give.
    """

    name: str
    description: str
    arguments: type[BaseModel]
    function: Callable[..., object]
    bound: Mapping[str, Any]
    idempotent: ClassVar = False  # the setup may say otherwise

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        schema = self.arguments.model_json_schema()
        return {key: value for key, value in schema.items() if key != "title"} | {"type": "object"}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to their types. Raises ValueError with a message for the model."""
        try:
            model = self.arguments.model_validate(arguments)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the arguments"
            raise ValueError(f"{self.name}: {place}: {first['msg']}") from error
        return {name: getattr(model, name) for name in type(model).model_fields}


def import_function(path: str) -> Callable[..., object]:
    """Return the function at the path `package.module:function`. Raises ValueError naming the mistake."""
    target: object = imported(path, "the tool function")
    if not callable(target):
        raise ValueError(f"the tool function {path!r} is a {type(target).__name__}, not a function")
    return target


def describe(path: str, function: Callable[..., object], bound: Mapping[str, Any]) -> DescribedFunction:
    """Return a function's description, without the arguments in `bound`.

    Raises ValueError if an argument's type cannot be JSON, or if there is no docstring.
    """
    name = path.rpartition(":")[2].rpartition(".")[2]
    summary = inspect.getdoc(function)
    if not summary:
        raise ValueError(
            f"the tool function {path!r} has no docstring: write one, which tells the model what the tool does"
        )
    signature = inspect.signature(function)
    if unknown := sorted(set(bound) - set(signature.parameters)):
        raise ValueError(f"the tool function {path!r} has no arguments {unknown}, which its kwargs give")
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ValueError(f"the tool function {path!r}: a type of its arguments cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.name in bound:
            continue
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ValueError(f"the tool function {path!r} has the argument {parameter}: a tool's arguments have names")
        if parameter.name not in types:
            raise ValueError(
                f"the tool function {path!r}: the argument {parameter.name!r} has no type; write for example "
                f"`{parameter.name}: str`"
            )
        default = ... if parameter.default is Parameter.empty else parameter.default
        fields[parameter.name] = (types[parameter.name], default)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        described = DescribedFunction(name, summary, model, function, bound)
        _ = described.parameters
    except (PydanticUserError, NameError, TypeError) as error:
        message = str(error).splitlines()[0]
        raise ValueError(f"the tool function {path!r} has an argument that JSON cannot hold: {message}") from error
    return described


def serve_function(program: ChildProgram, tool: DescribedFunction, limit: int) -> None:
    """Answer calls to a function, with `limit` characters each, until the connection is closed."""
    while True:
        try:
            message = json.loads(program.receive())
        except (EOFError, ConnectionResetError):
            return
        program.send(json_bytes({"call": message["call"], **answer(tool, message["arguments"], limit)}))


def answer(tool: DescribedFunction, arguments: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Call the function; its exceptions become answers."""
    try:
        checked = tool.checked(arguments)
    except ValueError as error:
        return {"text": bounded(f"error: {error}", limit), "error": True}
    try:
        value = tool.function(**checked, **tool.bound)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return sent(answer_of(value), limit)
    except BaseException as error:
        traceback.print_exc()  # for the log: the model sees only the last line
        return {"text": bounded(f"error: {type(error).__name__}: {error}", limit), "error": True}


def sent(given: ToolAnswer, limit: int) -> dict[str, Any]:
    """Return an answer for sending, with `limit` characters at most."""
    images = [base64.b64encode(each).decode() for each in given.images]
    return {"text": bounded(given.text, limit), "error": bool(given.error), "images": images}


async def _awaited(value: Any) -> object:  # noqa: ANN401  # returned by an async function
    return await value


async def serve_object(program: ChildProgram, setup: Mapping[str, Any]) -> None:
    """Make the object, which may need an event loop, and answer calls to it until the connection is closed."""
    tool = reported(program, setup)
    if tool is None or isinstance(tool, DescribedFunction):
        return
    reader, writer = await asyncio.open_connection(sock=program.connection)
    running: dict[int, asyncio.Task[None]] = {}

    async def run(message: Mapping[str, Any]) -> None:
        try:
            ended = await outcome(program, tool, message)
            writer.write(framed(json_bytes({"call": message["call"], **ended})))
        finally:
            running.pop(message["call"], None)

    while True:
        try:
            message = json.loads(await read_frame(reader, MAX_MESSAGE))
        except (EOFError, OSError):
            return
        number = message["call"]
        if "cancel" not in message:
            running[number] = asyncio.create_task(run(message))
        elif number in running:
            running[number].cancel()


async def outcome(program: ChildProgram, tool: Tool, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outcome of a call, or of closing the tool: an answer, `late`, or `failed` with the exception."""
    timeout_s = message["timeout_s"]
    try:
        async with asyncio.timeout(timeout_s + LATE_S) as limit:
            if "close" in message:
                await tool.close()
                return {}
            given: object = await tool.call(message["arguments"], timeout_s=timeout_s)
        if not isinstance(given, ToolAnswer):
            return {"failed": f"TypeError: call must return a ToolAnswer, not {type(given).__name__}"}
        return sent(given, MAX_CHARACTERS)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return {"late": True}
        traceback.print_exc()  # for the log: the run shows only the last line
        return {"failed": f"{type(error).__name__}: {error}"[:PROBLEM_CHARACTERS]}
    finally:
        program.end_if_forked()


def main() -> None:
    """Serve until the connection is closed."""
    selector = selectors.DefaultSelector()  # a forked child must not take the parent's events
    program, code = ChildProgram(selector.close), 1
    try:
        setup = json.loads(program.receive())
        prepare(setup["search"], setup["memory_bytes"])
        if setup["is_function"]:
            tool = reported(program, setup)
            if isinstance(tool, DescribedFunction):
                serve_function(program, tool, setup["max_characters"])
        else:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
                runner.run(serve_object(program, setup))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # threads started by a tool could keep the interpreter alive


if __name__ == "__main__":
    main()
