"""The benchmark of the sandbox runs, and reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.checkout import ROOT


def test_it_runs(tmp_path: Path) -> None:
    output = tmp_path / "sandbox.json"
    line = [sys.executable, "benchmarks/sandbox.py", "--quick", "--json", str(output)]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rate, left = json.loads(output.read_text())
    assert rate["ok"] is None and rate["details"]["programs"] == 10 and rate["details"]["programs_per_second"] > 0
    assert left["ratio"] == 0
