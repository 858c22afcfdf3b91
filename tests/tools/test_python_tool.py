"""The answers of the Python tool."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from megarl.sandbox.limits import Limits, SandboxError
from megarl.tools import python_tool
from megarl.tools.python_tool import PythonTool
from megarl.tools.tool import ToolAnswer, schema_of

pytestmark = pytest.mark.sandbox

LIMITS = Limits(timeout_s=60.0, cpu_s=30)


def answer_to(arguments: Mapping[str, Any], *, timeout_s: float = 60.0, **more: Any) -> ToolAnswer:
    async def call() -> ToolAnswer:
        tool = PythonTool(limits=LIMITS, slots=1, **more)
        try:
            return await tool.call(arguments, timeout_s=timeout_s)
        finally:
            await tool.close()

    return asyncio.run(call())


def test_what_a_program_prints_is_the_answer() -> None:
    assert answer_to({"code": "print(6 * 7)"}) == ToolAnswer("42")
    assert answer_to({"code": "x = 1"}) == ToolAnswer("(the program printed nothing)")


def test_an_exception_is_an_error_with_the_output_before_it() -> None:
    answer = answer_to({"code": "print('before')\n1 / 0"})
    assert answer.error
    assert answer.text.startswith("before\n") and answer.text.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        ("import sys; sys.exit(3)", "status 3"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("while True: print('x' * 1000)", "too much output"),
        ("def", "SyntaxError"),
        ("print('\\ud800')", "UnicodeEncodeError"),
        ("\x00", "null bytes"),
    ],
)
def test_other_endings_are_errors(code: str, reported: str) -> None:
    answer = answer_to({"code": code})
    assert answer.error and reported in answer.text


def test_the_callers_time_counts() -> None:
    answer = answer_to({"code": "import time; time.sleep(1000)"}, timeout_s=0.5)
    assert answer.error and "did not end in time" in answer.text


def test_arguments_that_are_none() -> None:
    for wrong in ({}, {"code": None}, {"code": ["print(1)"]}, {"code": "1", "language": "c"}):
        answer = answer_to(wrong)
        assert answer.error and answer.text.startswith("error: ")


def test_answers_are_bounded() -> None:
    answer = answer_to({"code": "print('x' * 5000)"}, max_characters=200)
    assert len(answer.text) <= 200 and "left out" in answer.text


def test_a_fence_is_taken_off_and_the_last_line_printed_if_asked_for() -> None:
    code = "```python\nx = 6\nx * 7\n```"
    assert "SyntaxError" in answer_to({"code": code}).text
    assert answer_to({"code": code}, unfence=True) == ToolAnswer("(the program printed nothing)")
    assert answer_to({"code": code}, unfence=True, print_last_line=True) == ToolAnswer("42")


def test_packages_are_imported_by_their_names() -> None:
    assert answer_to({"code": "import mpmath; print(mpmath.mpf(2))"}, packages=["mpmath"]) == ToolAnswer("2.0")


def test_the_texts_for_the_model_can_be_given() -> None:
    tool = PythonTool("run", slots=1, description="Runs it.", code_description="What to run.")
    asyncio.run(tool.close())
    schema = schema_of(tool)["function"]
    assert (schema["name"], schema["description"]) == ("run", "Runs it.")
    assert schema["parameters"]["properties"]["code"]["description"] == "What to run."


def test_without_a_sandbox_there_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise SandboxError("the program bwrap was not found")

    monkeypatch.setattr(python_tool, "require_sandbox", missing)
    with pytest.raises(SandboxError, match="bwrap"):
        PythonTool()
