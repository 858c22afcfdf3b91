"""The pages and the Makefile tell the same time of each target of the tests."""

from __future__ import annotations

import re

import pytest

from tests.support.checkout import ROOT

TIMES = {  # how each file tells the minutes of a target
    "README.md": r"make {} .*\((?:.*; )?(?:about )?(\d+) minutes\)",
    "Makefile": r"{}: .*## .*?(\d+) minutes",
    "docs/architecture.md": r"\| `make {}` \|.*\| (\d+) minutes \|",
    "CONTRIBUTING.md": r"make {} .*about (\d+) minutes",
}
EVERYWHERE = {"README.md", "Makefile", "docs/architecture.md"}


@pytest.mark.parametrize(
    "target", ["test", "test-system", "test-cluster", "test-environments", "test-oracles", "test-mcore"]
)
def test_a_target_takes_the_same_time_everywhere(target: str) -> None:
    told = {}
    for name, pattern in TIMES.items():
        found = re.search(f"^{pattern.format(target)}", (ROOT / name).read_text(), re.MULTILINE)
        if found is not None:
            told[name] = int(found[1])
    assert set(told) >= EVERYWHERE and len(set(told.values())) == 1, told
    assert (target == "test") == ("CONTRIBUTING.md" in told)


def test_the_time_of_all_tests_is_the_sum_of_the_measured_parts() -> None:
    """The Makefile has the parts of `test-all`; docs/architecture.md lists them above it."""
    (parts,) = re.findall(r"^test-all: (.*?)  ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    table = (ROOT / "docs" / "benchmarks.md").read_text().partition("## What the tests take")[2]
    measured = re.findall(r"^\| `make ([\w-]+)`.* ([\d.]+) \|$", table, re.MULTILINE)
    minutes = {name: float(time) for name, time in measured}
    above, told, _ = re.split(
        r"^\| `make test-all` \| all of the above \| about (\d+) minutes",
        (ROOT / "docs" / "architecture.md").read_text(),
        flags=re.MULTILINE,
    )
    assert int(told) == round(sum(minutes[part] for part in parts.split()))
    assert all(f"| `make {part}` |" in above for part in parts.split())
