"""Assets of the quickstart, which several whole runs use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's data and warm-started checkpoint, made once."""
    out = tmp_path_factory.mktemp("quickstart") / "assets"
    command = [sys.executable, "-m", "megarl.quickstart", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=600)
    return out
