"""Makes the tools that a list of specs names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from megarl.sandbox.bounds import Limits
from megarl.tools.calculator import Calculator
from megarl.tools.http_tool import HttpTool
from megarl.tools.python_tool import PythonTool
from megarl.tools.tool import Tool
from megarl.tools.user_function import UserFunctionTool

ToolKind = Literal["calculator", "python", "function", "http"]
KINDS: tuple[ToolKind, ...] = ("calculator", "python", "function", "http")


@dataclass(frozen=True)
class ToolSpec:
    """A tool to be made.

    Attributes:
        kind: the calculator, Python programs in the sandbox, a user's function, or a tool on another machine.
        name: the name by which the model calls it; None: the kind's own, or the function's.
        kwargs: further arguments of `PythonTool` (also the fields of `Limits`), `UserFunctionTool` or `HttpTool`.
    """

    kind: ToolKind
    name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


async def make_tools(specs: Sequence[ToolSpec]) -> list[Tool]:
    """Return the tools, ready to be called; the event loop goes on meanwhile.

    Raises ValueError for a spec that cannot be used or a name that stands twice, and SandboxError where Python programs
    cannot be sandboxed. Tools that were made before the one that failed are closed.
    """
    made: list[Tool] = []
    try:
        for spec in specs:
            tool = await asyncio.to_thread(make_tool, spec)
            made.append(tool)
            if [each.name for each in made].count(tool.name) > 1:
                raise ValueError(f"two tools have the name {tool.name!r}: give one of them another `name`")
    except BaseException:
        for each in made:
            await each.close()
        raise
    return made


def make_tool(spec: ToolSpec) -> Tool:
    """Return one tool; the same errors as `make_tools`."""
    kwargs = dict(spec.kwargs)
    try:
        return _make(spec, kwargs)
    except TypeError as error:
        raise ValueError(f"the tool {spec.name or spec.kind!r}: {error}") from error


def _make(spec: ToolSpec, kwargs: dict[str, Any]) -> Tool:
    named: dict[str, Any] = {} if spec.name is None else {"name": spec.name}
    match spec.kind:
        case "calculator":
            calculator = Calculator(**kwargs)
            calculator.name = spec.name or calculator.name
            return calculator
        case "python":
            limits = {each.name: kwargs.pop(each.name) for each in fields(Limits) if each.name in kwargs}
            return PythonTool(limits=Limits(**limits), **named, **kwargs)
        case "function":
            return UserFunctionTool(**named, **kwargs)
        case "http":
            return HttpTool(**named, **kwargs)
    raise ValueError(f"the tool kind {spec.kind!r} is none of {', '.join(KINDS)}")
