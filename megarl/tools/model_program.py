"""The program in what a model has given as code: without the fence around it, and with its last line printed. Pure."""

from __future__ import annotations

import re

_FENCED = re.compile(r"```python(.*?)```", re.DOTALL)


def without_fence(code: str) -> str:
    """Return what stands in the first Markdown fence ```python of the code; all of it if there is no such fence.

    As the tool of verl's recipe retool does.
    """
    found = _FENCED.search(code)
    return code if found is None else found[1].strip()


def with_last_line_printed(code: str) -> str:
    """Return the code with its last line that is not empty as the argument of `print`, unless it begins with `print`.

    As the tool of verl's recipe retool does, and as literally: a program fails by it that ends with an assignment, a
    comment, or an indented line.
    """
    lines = code.split("\n")
    last = next((index for index in reversed(range(len(lines))) if lines[index]), None)
    if last is not None and not lines[last].startswith("print"):
        lines[last] = f"print({lines[last]})"
    return "\n".join(lines)
