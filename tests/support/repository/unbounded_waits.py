"""Finds the waits whose end somebody else decides, and that have no bound where they stand.

In asynchronous code (`unbounded_waits`) these are: a future or a task, an event, a lock or a semaphore, a thread, and
`asyncio.wait` without a time limit, each unless it stands below `asyncio.timeout`. A call of a coroutine is none: its
own waits are found where they stand. Calls that block their thread are found by `blocking_waits`.
"""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

_OPEN = {"wait", "acquire", "get", "join"}  # of an event, a lock, a queue, if they have no arguments
_THREADS = {"to_thread", "run_in_executor"}
# Of a thread, a process, a lock, an event, a queue, a future: without arguments they wait forever.
_BLOCKING = {"wait", "acquire", "get", "join", "communicate", "result"}
_RECEIVING = {"accept", "recv", "recv_bytes"}  # of a connection, which has a time limit elsewhere if it has one
_CALLS = ("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "ray.get",
          "ray.wait", "urlopen", "create_connection")  # fmt: skip
_LIMITS = {"timeout", "timeout_s"}


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


def blocking_waits(root: Path) -> dict[str, list[str]]:
    """The waits below `root` that block a thread and have no bound where they stand, as `unbounded_waits` has them.

    In asynchronous functions `result` is none: tasks have ended where it is read, and futures of asyncio never wait.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for function, wait in _blocking(ast.parse(path.read_text()), "", False):
            found.setdefault(f"{path.relative_to(root).as_posix()}:{function}", []).append(wait)
    return found


def wrong_numbers(
    found: Mapping[str, list[str]], listed: Collection[str], several: Mapping[str, int]
) -> dict[str, list[str]]:
    """The waits of the functions that do not have as many of them as is listed, by `path:function`.

    A function that is in `listed` has one, or as many as `several` says; the others have none.
    """
    expected = {name: several.get(name, 1) for name in listed}
    names = sorted({*found, *expected})
    return {name: found.get(name, []) for name in names if len(found.get(name, [])) != expected.get(name, 0)}


def _blocking(node: ast.AST, function: str, in_coroutine: bool) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        name, inside = function, in_coroutine
        if isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef | ast.ClassDef):
            name, inside = f"{function}.{child.name}".lstrip("."), isinstance(child, ast.AsyncFunctionDef)
        if isinstance(child, ast.Call) and not isinstance(node, ast.Await) and _blocks(child, inside):
            yield name, ast.unparse(child)
        yield from _blocking(child, name, inside)


def _blocks(call: ast.Call, in_coroutine: bool) -> bool:
    limits = [keyword.value for keyword in call.keywords if keyword.arg in _LIMITS]
    if any(not (isinstance(each, ast.Constant) and each.value is None) for each in limits):
        return False
    path, called = ast.unparse(call.func), _called(call)
    if any(path == each or path.endswith(f".{each}") for each in _CALLS):
        return called != "create_connection" or len(call.args) < 2
    if not isinstance(call.func, ast.Attribute):
        return False
    if called in _RECEIVING:
        return True
    if called == "wait_for":
        return len(call.args) < 2
    none = all(isinstance(each, ast.Constant) and each.value is None for each in call.args)
    return called in _BLOCKING and none and not (in_coroutine and called == "result")
