"""Tools from specs."""

from __future__ import annotations

import asyncio

import pytest

from megarl.tools.make import ToolSpec, make_tools
from megarl.tools.tool import schema_of

FUNCTION = {"function": "tests.support.tool_functions:add"}
HTTP = {"url": "http://127.0.0.1:1/", "description": "Search.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.sandbox
def test_each_kind() -> None:
    async def made() -> list[tuple[str, bool]]:
        specs = [
            ToolSpec("calculator"),
            ToolSpec("python", kwargs={"timeout_s": 60.0, "cpu_s": 30, "slots": 1}),
            ToolSpec("function", "plus", FUNCTION),
            ToolSpec("http", "search", HTTP),
        ]
        tools = await make_tools(specs)
        for each in tools:
            assert schema_of(each)["function"]["parameters"]["type"] == "object"
        arguments = ({"expression": "1+1"}, {"code": "print(2)"}, {"first": 1})
        for tool, given in zip(tools, arguments, strict=False):
            answer = await tool.call(given, timeout_s=60.0)
            assert (answer.text, answer.error) == ("2", False)
        for each in tools:
            await each.close()
        return [(each.name, each.idempotent) for each in tools]

    found = asyncio.run(made())
    assert found == [("calculator", True), ("python", True), ("plus", False), ("search", False)]


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([ToolSpec("calculator"), ToolSpec("calculator")], "two tools have the name 'calculator'"),
        ([ToolSpec("python", kwargs={"memory_mib": 1})], "memory_mib"),
        ([ToolSpec("python", kwargs={"colour": 1})], "colour"),
        ([ToolSpec("http", "search")], "url"),
        ([ToolSpec("ftp")], "none of calculator, python, function, http"),  # type: ignore[arg-type]
    ],
)
def test_specs_that_cannot_be_used(specs: list[ToolSpec], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        asyncio.run(make_tools(specs))
