"""The program in a response and the tests in a row, read from text. Pure."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FENCE = re.compile(r"^```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class CodeTests:
    """The tests of a row: either pairs of input and expected output, or pieces of Python in which assertions hold."""

    pairs: tuple[tuple[str, str], ...] = ()
    pieces: tuple[str, ...] = ()


def last_program(response: str) -> str | None:
    """Return the last fenced block of Python; else the last block without a language; None if there is neither."""
    blocks = [(language.lower(), text) for language, text in _FENCE.findall(response.replace("\r\n", "\n"))]
    for languages in (_PYTHON, ("",)):
        found = [text for language, text in blocks if language in languages]
        if found:
            return str(found[-1])
    return None


def read_tests(row: Mapping[str, Any]) -> CodeTests:
    """Return the tests of a row. Raises ValueError that says what the row has to hold."""
    given = row.get("tests", row if "inputs" in row else None)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"the row's `tests` begins with a brace and is no JSON: {error}") from error
    if isinstance(given, Mapping):
        return CodeTests(pairs=_pairs(given.get("inputs"), given.get("outputs")))
    if isinstance(given, str):
        return CodeTests(pieces=_pieces(given))
    if isinstance(given, Sequence) and given and all(isinstance(each, str) for each in given):
        for number, each in enumerate(given):
            if not _parsed(each).body:
                raise ValueError(f"number {number} of the row's `tests` has no statement: every program would pass it")
        return CodeTests(pieces=tuple(given))
    raise ValueError(
        "reward.function code needs the field `tests` in each row: Python with assertions, as one text or a list of "
        "texts, or `inputs` and `outputs`, two lists of texts for standard input and output"
    )


def _pairs(inputs: object, outputs: object) -> tuple[tuple[str, str], ...]:
    lists = [each for each in (inputs, outputs) if isinstance(each, Sequence) and not isinstance(each, str)]
    if len(lists) != 2 or len(lists[0]) != len(lists[1]) or not lists[0]:
        raise ValueError(
            "the row's `inputs` and `outputs` have to be two lists of the same length, with at least one test"
        )
    if not all(isinstance(each, str) for both in lists for each in both):
        raise ValueError("the row's `inputs` and `outputs` have to be texts, as a program reads and writes them")
    return tuple(zip(*lists, strict=True))


def _pieces(text: str) -> tuple[str, ...]:
    """Return a text as one piece for each assertion at its top level, with the statements before it."""
    statements = _parsed(text).body
    if not statements:
        raise ValueError("the row's `tests` is empty")
    pieces: list[str] = []
    waiting: list[str] = []
    for statement in statements:
        waiting.append(ast.unparse(statement))
        if isinstance(statement, ast.Assert):
            pieces.append("\n".join(waiting))
            waiting = []
    if waiting:
        pieces.append("\n".join(waiting))
    return tuple(pieces)


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"a test of the row is no Python: {error}: {text[:80]!r}") from error


def same_output(written: str, expected: str) -> bool:
    """Tell whether two outputs are equal but for white space at the ends of lines and empty lines at the end."""
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (written, expected))
    return first == second
