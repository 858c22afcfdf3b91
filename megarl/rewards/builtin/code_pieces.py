"""Turns Python tests into pieces that run as intended and assert something. Pure.

Executed as they are, files of pytest and unittest, HumanEval's `check`, and bare comparisons only define something or
discard a value: every program would pass them.
"""

import ast
from collections.abc import Iterator, Sequence

# Tests import the answer by these names.
_ANSWER_MODULES = ("solution", "main", "answer", "submission", "candidate", "program")
_CATCHING = ("AssertionError", "Exception", "BaseException")
_RUNNERS = ("unittest.main", "pytest.main", "doctest.testmod")


def pieces_of(tests: str | Sequence[str], entry_point: object = None) -> tuple[str, ...]:
    """Return tests as pieces that each assert something, with the code before them.

    A text has a piece for each assertion at its top level, a list one for each of its texts; both have one for each
    test function or method. `entry_point` names the function that HumanEval's `check(candidate)` gets. Raises
    ValueError for tests that assert nothing, or need something unavailable.
    """
    parsed = [_statements(text) for text in ([tests] if isinstance(tests, str) else tests)]
    for number, statements in enumerate(parsed):
        if not statements:
            which = "the row's `tests`" if isinstance(tests, str) else f"number {number} of the row's `tests`"
            raise ValueError(f"{which} has no statement: every program would pass it")
    every = [statement for statements in parsed for statement in statements]
    groups = [[statement] for statement in every] if isinstance(tests, str) else parsed
    groups += [[call] for call in _missing_calls(every, entry_point)]
    checking = _checking_functions(every)
    pieces: list[str] = []
    waiting: list[str] = []
    for group in groups:
        waiting += [ast.unparse(statement) for statement in group]
        if any(_is_check(node, checking) for statement in group for node in _executed(statement)):
            pieces.append("\n".join(waiting))
            waiting = []
    if not pieces:
        raise ValueError("the row's `tests` never assert anything: every program would pass them")
    if waiting:
        pieces[-1] = "\n".join([pieces[-1], *waiting])
    return tuple(pieces)


def _statements(text: str) -> list[ast.stmt]:
    """Parse a text: unwrap `if __name__` blocks, assert bare comparisons, and leave out test runners."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"a test of the row is not Python: {error}: {text[:80]!r}") from error
    found: list[ast.stmt] = []
    for statement in body:
        main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        found += statement.body if main and isinstance(statement, ast.If) else [statement]
    found = [_asserted(each) for each in found if not _is_runner(each) and not _imports_answer(each)]
    left = [statement for statement in found if ast.unparse(statement) != "import pytest"]
    if len(left) < len(found) and any(
        isinstance(node, ast.Name) and node.id == "pytest" for each in left for node in ast.walk(each)
    ):
        raise ValueError("the row's `tests` use pytest, which the sandbox does not have; write them as assertions")
    return left


def _asserted(statement: ast.stmt) -> ast.stmt:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Compare | ast.BoolOp):
        return ast.copy_location(ast.Assert(statement.value), statement)
    return statement


def _imports_answer(statement: ast.stmt) -> bool:
    """Return whether a statement imports names of the answer, which are available without it."""
    if isinstance(statement, ast.Import) and any(each.name in _ANSWER_MODULES for each in statement.names):
        raise ValueError(
            f"write {ast.unparse(statement)!r} of the row's `tests` as `from ... import` of the answer's names"
        )
    return isinstance(statement, ast.ImportFrom) and statement.module in _ANSWER_MODULES


def _is_runner(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) in _RUNNERS


def _missing_calls(statements: Sequence[ast.stmt], entry_point: object) -> list[ast.stmt]:
    """Return the calls that a test runner would make: test functions, methods of test cases, `check`."""
    called = {ast.unparse(node.func) for each in statements for node in _executed(each) if isinstance(node, ast.Call)}
    calls: list[str] = []
    for each in statements:
        if isinstance(each, ast.AsyncFunctionDef) and each.name.startswith("test"):
            raise ValueError(f"the row's test {each.name} is asynchronous, which cannot be run")
        if isinstance(each, ast.ClassDef):
            calls += _methods(each)
        if not isinstance(each, ast.FunctionDef) or each.name in called:
            continue
        needed = len(each.args.args) - len(each.args.defaults)
        if each.name.startswith("test"):
            if needed or each.decorator_list:
                raise ValueError(f"the row's test {each.name} needs arguments of a test runner; write it without them")
            calls.append(f"{each.name}()")
        elif each.name == "check" and needed == 1:
            if not isinstance(entry_point, str) or not entry_point.isidentifier():
                raise ValueError("the row's `tests` define check(candidate); name the function in `entry_point`")
            calls.append(f"check({entry_point})")
    return ast.parse("\n".join(calls)).body


def _methods(case: ast.ClassDef) -> list[str]:
    """Return a call for each test method of a class: a unittest.TestCase, or a plain class for pytest."""
    names = [each.name for each in case.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
    if any(ast.unparse(base).endswith("TestCase") for base in case.bases):
        return [f"{case.name}({name!r}).debug()" for name in names]
    return [f"{case.name}().{name}()" for name in names] if case.name.startswith("Test") else []


def _executed(node: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that run with it and whose failures are not caught.

    `inside`: also those inside functions and classes.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) and not inside:
        return
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant) and not node.test.value:
        return
    if isinstance(node, ast.With) and any("suppress" in ast.unparse(each.context_expr) for each in node.items):
        return
    yield node
    caught = isinstance(node, ast.Try) and any(map(_catches_assertions, node.handlers))
    for child in ast.iter_child_nodes(node):
        if not caught or child not in node.body:  # type: ignore[attr-defined]
            yield from _executed(child, inside)


def _catches_assertions(handler: ast.ExceptHandler) -> bool:
    names = None if handler.type is None else {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
    return names is None or bool(names & set(_CATCHING))


def _checking_functions(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Return the names of the tests' functions and classes that assert or raise somewhere inside."""
    checking: set[str] = set()
    for _ in statements:  # a function may call one that asserts
        checking |= {
            each.name
            for each in statements
            if isinstance(each, ast.FunctionDef | ast.ClassDef)
            and any(_is_check(node, checking) for inner in each.body for node in _executed(inner, inside=True))
        }
    return frozenset(checking)


def _is_check(node: ast.AST, checking: frozenset[str] | set[str]) -> bool:
    if isinstance(node, ast.Assert):  # true constants and non-empty tuples always hold
        test = node.test
        return not (isinstance(test, ast.Constant) and test.value) and not (isinstance(test, ast.Tuple) and test.elts)
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    names = {each.id for each in ast.walk(node.func) if isinstance(each, ast.Name)}
    last = ast.unparse(node.func).rpartition(".")[2]
    return bool(names & checking) or last.startswith("assert") or last == "fail"
