"""The tool that runs a model's Python programs in the sandbox."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.sandbox.availability import require_sandbox
from megarl.sandbox.limits import Limits, RunResult, SandboxError
from megarl.sandbox.runner import Sandbox
from megarl.tools.tool import MAX_CHARACTERS, ToolAnswer, bounded

_FENCED = re.compile(r"```python(.*?)```", re.DOTALL)


def without_fence(code: str) -> str:
    """Return the content of the first Markdown fence ```python, or all of the code, as in verl's recipe retool."""
    found = _FENCED.search(code)
    return code if found is None else found[1].strip()


def with_last_line_printed(code: str) -> str:
    """Return the code with its last non-empty line wrapped in `print`, unless it begins with `print`.

    This is literally what verl's recipe retool does: it breaks programs that end with an assignment, a comment or an
    indented line.
    """
    lines = code.split("\n")
    last = next((index for index in reversed(range(len(lines))) if lines[index]), None)
    if last is not None and not lines[last].startswith("print"):
        lines[last] = f"print({lines[last]})"
    return "\n".join(lines)


DESCRIPTION = (
    "Run a Python program and return what it prints. Each program starts from nothing; it has no network, and "
    "its files are gone when it ends."
)
_ENDED = {
    "time": "the program did not end in time and was killed",
    "cpu": "the program used too much CPU time and was killed",
    "memory": "the program used too much memory and was killed",
    "output": "the program wrote too much output and was killed",
    "disk": "the program made too many files and was killed",
}


class PythonTool:
    """The tool `python`. Each call is a separate process, so it may be repeated.

    `limits`: of each program; `slots`: programs at once (default: one per core); `packages`: names of installed
    packages, or directories, that programs can import (`find_packages`). `description`, `code_description`: of the tool
    and its argument, for the model. `unfence`, `print_last_line`: first apply `without_fence`,
    `with_last_line_printed`. Raises SandboxError if this machine has no sandbox, and ValueError for missing packages.
    """

    idempotent = True

    def __init__(
        self,
        name: str = "python",
        *,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        slots: int | None = None,
        packages: Sequence[str] = (),
        queue_s: float = 60.0,
        max_characters: int = MAX_CHARACTERS,
        description: str = DESCRIPTION,
        code_description: str = "the program; print what you want to see",
        unfence: bool = False,
        print_last_line: bool = False,
    ) -> None:
        require_sandbox()
        self.name, self.description = name, description
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": code_description}},
            "required": ["code"],
        }
        self._unfence, self._print_last_line = unfence, print_last_line
        self._limits, self._max_characters = limits, max_characters
        self._sandbox = Sandbox(limits, slots=slots, queue_s=queue_s, packages=packages)

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Run `arguments["code"]` for `timeout_s` or the limits' time, whichever is less.

        The wait for a place, at most `queue_s`, is additional.
        """
        code = arguments.get("code")
        if not isinstance(code, str):
            return ToolAnswer(f"error: {self.name} needs the argument `code`, a string", error=True)
        if unknown := sorted(set(arguments) - {"code"}):
            return ToolAnswer(f"error: {self.name} has no argument {unknown[0][:80]!r}", error=True)
        try:
            result = await self._sandbox.run(self._program(code), timeout_s=min(timeout_s, self._limits.timeout_s))
        except (SandboxError, OSError) as error:  # OSError: no descriptor or process is left
            return ToolAnswer(bounded(f"error: the program was not run: {error}", self._max_characters), error=True)
        return ToolAnswer(bounded(shown(result), self._max_characters), error=not result.ok)

    def _program(self, code: str) -> str:
        """Return the program to run for the model's code."""
        program = without_fence(code) if self._unfence else code
        return with_last_line_printed(program) if self._print_last_line else program

    async def close(self) -> None:
        """End the running programs."""
        await asyncio.to_thread(self._sandbox.close)


def shown(result: RunResult) -> str:
    """Return a run's text for the model: its output, its errors, and how it ended if not normally."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.limit is not None:
        parts.append(f"error: {_ENDED[result.limit]}")
    elif result.status is not None and result.status < 0:
        parts.append(f"error: the program was ended by signal {-result.status}")
    elif result.status and not result.stderr:
        parts.append(f"error: the program ended with status {result.status}")
    return "\n".join(part for part in parts if part) or "(the program printed nothing)"
