"""Finds the waits of asynchronous code whose end somebody else decides, and that have no bound where they stand.

These are: a future or a task, an event, a lock or a semaphore, a thread, and `asyncio.wait` without a time limit, each
unless it stands below `asyncio.timeout`. A call of a coroutine is none: its own waits are found where they stand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_OPEN = {"wait", "acquire", "get", "join"}  # of an event, a lock, a queue, if they have no arguments
_THREADS = {"to_thread", "run_in_executor"}


def unbounded_waits(root: Path) -> dict[str, list[str]]:
    """The waits below `root` by `path:function`, in the order of the code."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for function, wait in _waits(ast.parse(path.read_text()), ""):
            found.setdefault(f"{path.relative_to(root).as_posix()}:{function}", []).append(wait)
    return found


def _waits(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        name = function
        if isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}".lstrip(".")
        if isinstance(child, ast.AsyncWith):
            contexts = [item.context_expr for item in child.items]
            if any(isinstance(each, ast.Call) and _called(each).startswith("timeout") for each in contexts):
                continue
            yield from ((name, ast.unparse(each)) for each in contexts if not isinstance(each, ast.Call))
        if isinstance(child, ast.Await) and _is_open(child.value):
            yield name, ast.unparse(child.value)
        yield from _waits(child, name)


def _is_open(awaited: ast.expr) -> bool:
    if not isinstance(awaited, ast.Call):
        return True
    keywords = {keyword.arg for keyword in awaited.keywords}
    if ast.unparse(awaited.func) == "asyncio.wait":
        return "timeout" not in keywords
    if _called(awaited) in _OPEN and not awaited.args and not keywords:
        return True
    return any(isinstance(each, ast.Call) and _called(each) in _THREADS for each in ast.walk(awaited))


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]
