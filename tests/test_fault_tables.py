"""docs/reference/faults.md against its tests: each one that it names exists."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.checkout import ROOT

_REFERENCE = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)(?:::(test_\w+))?`")


def references_of(cell: str) -> list[tuple[Path, str]]:
    """Return the files and tests of a row; a name without a folder is in the folder of the one before."""
    found: list[tuple[Path, str]] = []
    for name, test in _REFERENCE.findall(cell):
        folder = ROOT if name.startswith("tests/") else found[-1][0].parent if found else None
        if folder is not None:
            found.append((folder / name, test))
    return found


def documented() -> Iterator[tuple[Path, str]]:
    for line in (ROOT / "docs" / "reference" / "faults.md").read_text().splitlines():
        if line.startswith("| "):
            yield from references_of(line.rsplit(" | ", 1)[-1])


def missing(references: list[tuple[Path, str]]) -> list[str]:
    """The references to tests that do not exist. A reference without a test is to all of its file."""
    return [
        f"{file.relative_to(ROOT)}::{test}"
        for file, test in references
        if not file.is_file() or (test and not re.search(rf"^(?:async )?def {test}\(", file.read_text(), re.MULTILINE))
    ]


def test_the_tests_of_the_fault_tables_exist() -> None:
    references = list(documented())
    assert len(references) > 100
    assert missing(references) == []


def test_a_reference_to_a_test_that_is_gone_is_found() -> None:
    cell = "`tests/test_fault_tables.py::test_gone`, `test_fault_tables.py::test_the_tests_of_the_fault_tables_exist`"
    assert missing(references_of(f"{cell}; `test_lost.py`")) == [
        "tests/test_fault_tables.py::test_gone",
        "tests/test_lost.py::",
    ]
