"""Reads the program in a response and the tests in a row. Pure."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rewards.builtin.code_pieces import pieces_of

# A fence may be indented, follow a list marker, and have any length; the closing one is at least as long.
_FENCE = re.compile(
    r"^[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[A-Za-z0-9_+-]*)[^\n`]*\n"
    r"(?P<text>.*?)^[ \t]*(?P=fence)[`~]*[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
TOLERANCE = 1e-6  # of decimals, absolute or relative, as in programming contests
# JSON has no tuples and rounds decimals. This definition replaces the answer's, if it has one.
_SAME = f"""\
def _same(found, wanted, listed=False):
    if listed and _same(found, wanted[0]): return True
    if isinstance(found, (list, tuple)) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    if float in (type(found), type(wanted)) and {{type(found), type(wanted)}} <= {{int, float}}:
        return found == wanted or abs(found - wanted) <= {TOLERANCE} * max(1.0, abs(wanted))
    return found == wanted
"""
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class CodeTests:
    """The tests of a row: either pairs of input and expected output, or pieces of Python with assertions."""

    pairs: tuple[tuple[str, str], ...] = ()
    pieces: tuple[str, ...] = ()


def last_program(response: str) -> str | None:
    """Return the last fenced Python block, else the last one without a language, else None."""
    blocks = [
        (match["language"].lower(), textwrap.dedent(match["text"]))
        for match in _FENCE.finditer(response.replace("\r\n", "\n"))
    ]
    for languages in (_PYTHON, ("",)):
        found = [text for language, text in blocks if language in languages]
        if found:
            return str(found[-1])
    return None


def read_tests(row: Mapping[str, Any]) -> CodeTests:
    """Return the tests of a row. Raises ValueError saying what the row must have; each test must assert something."""
    given = row.get("tests", row if "inputs" in row else None)
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        try:
            given = json.loads(given)
        except ValueError as error:
            if given.lstrip()[0] == "{":
                raise ValueError(f"the row's `tests` begins with a brace and is not JSON: {error}") from error
    if isinstance(given, Mapping):
        name = given.get("fn_name")
        inputs, outputs = given.get("inputs"), given.get("outputs")
        return CodeTests(pieces=_calls(name, inputs, outputs)) if name else CodeTests(pairs=_pairs(inputs, outputs))
    if isinstance(given, Sequence) and any(isinstance(each, Mapping) for each in given):
        raise ValueError(
            "the row's `tests` is a list of cases; write them as `inputs` and `outputs`, two lists of texts, or with "
            "`fn_name` as the arguments and results of calls"
        )
    if isinstance(given, str) or (
        isinstance(given, Sequence) and given and all(isinstance(each, str) for each in given)
    ):
        return CodeTests(pieces=pieces_of(given, row.get("entry_point")))
    raise ValueError(
        "reward.function code needs the field `tests` in each row: Python with assertions, as one text or a list of "
        "texts, or `inputs` and `outputs`, two lists of texts for standard input and output"
    )


def _pairs(inputs: object, outputs: object) -> tuple[tuple[str, str], ...]:
    """Return pairs of what a program reads and must write, one per test."""
    both = _two_lists(inputs, outputs)
    if not all(isinstance(each, str) for one in both for each in one):
        raise ValueError("the row's `inputs` and `outputs` must be texts, as a program reads and writes them")
    return tuple(zip(*both, strict=True))


def _calls(name: object, inputs: object, outputs: object) -> tuple[str, ...]:
    """Return assertions about a function, as in APPS: the arguments of each call, and its expected result.

    If all results are lists of one element, as in some rows of APPS, the element counts too. The function may be a
    method of a class `Solution`.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the row's `fn_name` is not the name of a function: {name!r}")
    arguments, results = _two_lists(inputs, outputs)
    if not all(isinstance(each, Sequence) and not isinstance(each, str) for each in arguments):
        raise ValueError(f"with `fn_name` each of the row's `inputs` is the list of arguments of a call of {name}")
    function = f"(Solution().{name} if hasattr(globals().get('Solution'), {name!r}) else {name})"
    listed = all(isinstance(result, list) and len(result) == 1 for result in results)
    calls = (
        f"assert _same({function}(*{list(each)!r}), {result!r}{', listed=True' * listed})"
        for each, result in zip(arguments, results, strict=True)
    )
    return (_SAME + next(calls), *calls)


def _two_lists(inputs: object, outputs: object) -> tuple[Sequence[Any], Sequence[Any]]:
    lists = [each for each in (inputs, outputs) if isinstance(each, Sequence) and not isinstance(each, str)]
    if len(lists) != 2 or len(lists[0]) != len(lists[1]) or not lists[0]:
        raise ValueError(
            "the row's `inputs` and `outputs` must be two lists of the same length, with at least one test"
        )
    return lists[0], lists[1]


def same_output(written: str, expected: str) -> bool:
    """Return whether two outputs are equal, ignoring trailing white space and empty lines at the end.

    Decimals of the expected output are compared within `TOLERANCE`.
    """
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (written, expected))
    return len(first) == len(second) and all(map(_same_line, first, second))


def _same_line(written: str, expected: str) -> bool:
    if written == expected or "." not in expected:
        return written == expected
    ours, theirs = (re.split(r"(\s+)", line) for line in (written, expected))
    return len(ours) == len(theirs) and all(map(_near, ours, theirs))


def _near(written: str, expected: str) -> bool:
    if written == expected or "." not in expected:
        return written == expected
    if not (_NUMBER.fullmatch(written) and _NUMBER.fullmatch(expected)):
        return False
    wanted = float(expected)
    return abs(float(written) - wanted) <= TOLERANCE * max(1.0, abs(wanted))
