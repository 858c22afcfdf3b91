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


@pytest.mark.parametrize("target", ["test", "test-system", "test-cluster", "test-environments", "test-oracles"])
def test_a_target_takes_the_same_time_everywhere(target: str) -> None:
    told = {}
    for name, pattern in TIMES.items():
        found = re.search(f"^{pattern.format(target)}", (ROOT / name).read_text(), re.MULTILINE)
        if found is not None:
            told[name] = int(found[1])
    assert set(told) >= EVERYWHERE and len(set(told.values())) == 1, told
    assert (target == "test") == ("CONTRIBUTING.md" in told)
