"""docs/reliability.md against its tests: each one that it names exists, and those that are slow are said to be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

_SLOW = re.compile(r"\bmark\.slow\b|\bSLOW\b")
_REFERENCE = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(test_\w+))?`( \((?:[^()`]|`[^`]*`)*\))?")


@dataclass(frozen=True)
class Reference:
    """A test that the page names. `note`: what stands in brackets after it."""

    file: Path
    test: str | None
    note: str


def references_of(cell: str) -> list[Reference]:
    """Return the tests of a row; a name without a folder is in the folder of the one before."""
    found: list[Reference] = []
    for name, test, note in _REFERENCE.findall(cell):
        folder = ROOT if name.startswith("tests/") else found[-1].file.parent if found else None
        if folder is not None:
            found.append(Reference(folder / name, test or None, note))
    return found


def documented() -> Iterator[Reference]:
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines():
        if line.startswith("| "):
            yield from references_of(line.rsplit(" | ", 1)[-1])


def speeds(source: str) -> dict[str, str]:
    """Return of each test of a file whether all, some or none of its cases are slow."""
    tree = ast.parse(source)
    whole = any(
        isinstance(each, ast.Assign)
        and ast.unparse(each.targets[0]) == "pytestmark"
        and _SLOW.search(ast.unparse(each))
        for each in tree.body
    )
    found = {}
    for each in tree.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_"):
            marks = [ast.unparse(mark) for mark in each.decorator_list]
            slow = whole or any(_SLOW.fullmatch(mark.removeprefix("pytest.")) for mark in marks)
            found[each.name] = "all" if slow else "some" if any(map(_SLOW.search, marks)) else "none"
    return found


def mistake(reference: Reference, cases: dict[str, str]) -> str:
    """Return what is wrong with a reference to a file with these tests; an empty text if nothing is."""
    if reference.test is not None and reference.test not in cases:
        return "there is no such test"
    kinds = {cases[reference.test]} if reference.test else set(cases.values())
    if kinds == {"all"} and "slow" not in reference.note:
        return "it is slow"
    if reference.test and kinds == {"some"} and "slow" not in reference.note:
        return "some of its cases are slow"
    return "it is not slow" if reference.note == " (slow)" and kinds != {"all"} else ""


def test_the_tests_of_the_fault_tables_exist_and_slow_ones_are_marked() -> None:
    references = list(documented())
    assert len(references) > 100
    assert [str(each.file) for each in references if not each.file.is_file()] == []
    found = [(each, mistake(each, speeds(each.file.read_text()))) for each in references]
    assert [f"{each.file.relative_to(ROOT)}::{each.test}: {text}" for each, text in found if text] == []


@pytest.mark.parametrize(
    ("cell", "mistakes"),
    [
        ("`tests/test_fault_tables.py::test_slow`", ["it is slow"]),
        ("`tests/test_fault_tables.py::test_slow` (slow), `test_fault_tables.py` (part `x`)", ["", ""]),
        ("`tests/test_fault_tables.py::test_some` (x, y)", ["some of its cases are slow"]),
        ("`tests/test_fault_tables.py::test_some` (x: slow, y); `tests/test_fault_tables.py`", ["", ""]),
        (
            "`tests/test_fault_tables.py::test_fast` (slow), `test_fault_tables.py` (slow)",
            ["it is not slow", "it is not slow"],
        ),
        ("`tests/test_fault_tables.py::test_gone`", ["there is no such test"]),
    ],
)
def test_wrong_marks_are_found(cell: str, mistakes: list[str]) -> None:
    source = (
        "@pytest.mark.slow\ndef test_slow(): ...\ndef test_fast(): ...\n"
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=SLOW)])\nasync def test_some(x): ...\n"
    )
    assert [mistake(each, speeds(source)) for each in references_of(cell)] == mistakes
    whole = speeds(f"pytestmark = [pytest.mark.engine, pytest.mark.slow]\n{source}")
    assert set(whole.values()) == {"all"}
