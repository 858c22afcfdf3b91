"""The changes of a model's code before it runs: as the tool of verl's recipe retool does it, line for line."""

import pytest

from megarl.tools.python_tool import with_last_line_printed, without_fence


@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("Here it is:\n```python\nx = 1\nx\n```\nand\n```python\nprint(2)\n```", "x = 1\nx"),
        ("```python print(1)```", "print(1)"),
        ("```\nprint(1)\n```", "```\nprint(1)\n```"),  # the published pattern has the language
        ("```python\nprint(1)", "```python\nprint(1)"),
        ("", ""),
    ],
)
def test_the_first_fence_is_the_program(code: str, program: str) -> None:
    assert without_fence(code) == program


@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("x = 1\nx + 1", "x = 1\nprint(x + 1)"),
        ("x = 1\nx + 1\n\n", "x = 1\nprint(x + 1)\n\n"),
        ("print(1)", "print(1)"),
        ("print_all(x)", "print_all(x)"),
        ("x = 1", "print(x = 1)"),
        ("if x:\n    f()", "if x:\nprint(    f())"),
        ("f()\n  ", "f()\nprint(  )"),  # white space is not empty
        ("", ""),
        ("\n", "\n"),
    ],
)
def test_the_last_line_is_printed(code: str, program: str) -> None:
    assert with_last_line_printed(code) == program
