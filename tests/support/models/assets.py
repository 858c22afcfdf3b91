"""The assets of a quickstart: the problems and the warm-started checkpoint from which its run begins."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import ROOT, environment


@dataclass(frozen=True)
class Assets:
    """The problems and the warm-started checkpoint, and the seconds that it took to make them."""

    directory: Path
    seconds: float


def make_assets(out: Path, *options: str) -> Assets:
    """Run `examples.quickstart` with `options`, as a target of the Makefile does before its run."""
    command = [sys.executable, "-m", "examples.quickstart", *options, "--out", str(out)]
    begun = time.monotonic()
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=600)
    return Assets(out, time.monotonic() - begun)
