"""Published implementations of the same functions, to compare with: the directory that tools/oracles.sh has made.

    make test-oracles

makes it and runs the tests that are marked with `oracle`. Without the environment variable MEGARL_ORACLES these tests
are skipped, with the reason. The packages of the directory are found after those of the environment, so that they
replace none of these.
"""

import importlib
import os
import sys
from functools import cache
from importlib.metadata import distributions
from types import ModuleType

import pytest

from tests.support.checkout import ROOT

VARIABLE = "MEGARL_ORACLES"
LOCK = ROOT / "requirements" / "oracles.lock"


def oracle(module: str) -> ModuleType:
    """A module of one of the packages; skips the test if there is no directory of them."""
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"{VARIABLE} names no directory of verl and areal: make test-oracles")
    return _imported(module, given)


@cache
def _imported(module: str, given: str) -> ModuleType:
    package = module.partition(".")[0]
    found = {each.metadata["Name"]: each.version for each in distributions(path=[given])}
    wanted = pinned()[package]
    if (version := found.get(package)) != wanted:
        raise RuntimeError(f"{VARIABLE}={given} has {package} {version} instead of {wanted}: make test-oracles")
    if given not in sys.path:
        sys.path.append(given)
    return importlib.import_module(module)


def pinned() -> dict[str, str]:
    """The version of each package in the lock file."""
    lines = (line for line in LOCK.read_text().splitlines() if not line.startswith("#"))
    return dict(line.split("==") for line in lines)
