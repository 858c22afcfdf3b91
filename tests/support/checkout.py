"""This checkout: where it is, which data it has for tests, and how tests start processes that import it."""

import os
import sys
from pathlib import Path

from megarl.cli.train import TORCHRUN

ROOT = Path(__file__).resolve().parents[2]
EXCERPTS = Path(__file__).parent / "excerpts"
PROMPTS = Path(__file__).parent / "prompts.jsonl"


def environment(**more: str) -> dict[str, str]:
    """The environment of a child process: it imports this checkout, computes with one thread, and a launch script calls
    this very Python."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **more}


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """A command line, what `megarl train` becomes: torchrun starts `ranks` processes here, at a free port."""
    return [sys.executable, *TORCHRUN, "--nproc-per-node", str(ranks), *arguments]
