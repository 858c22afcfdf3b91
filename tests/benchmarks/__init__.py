"""Tests of the measuring programs. The rest of the tests imports `benchmarks.lib` only."""

import importlib
from types import ModuleType

from tests.support.checkout import ROOT


def load_script(name: str) -> ModuleType:
    """Return the module of a benchmark, as "load.control_plane" or "trl_race"."""
    main = (ROOT / "benchmarks" / name / "__main__.py").is_file()
    return importlib.import_module(f"benchmarks.{name}.__main__" if main else f"benchmarks.{name}")
