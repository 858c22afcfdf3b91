"""The benchmark of the sandbox runs, and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks import sandbox
from benchmarks.report import Ratio
from megarl.sandbox.runner import Sandbox
from tests.support.checkout import ROOT


def test_it_runs(tmp_path: Path) -> None:
    output = tmp_path / "sandbox.json"
    line = [sys.executable, "benchmarks/sandbox.py", "--quick", "--json", str(output)]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rate, left = json.loads(output.read_text())
    assert rate["ok"] is None and rate["details"]["programs"] == 10 and rate["details"]["programs_per_second"] > 0
    assert left["name"] == "processes left after kills" and left["ratio"] == 0
    assert left["details"]["programs"] == 3 * rate["details"]["slots"]
    assert rate["details"]["slots"] == Sandbox().slots


def test_a_process_that_is_left_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"m{uuid.uuid4().hex[:12]}"
    program = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0); time.sleep(1000)"
    monkeypatch.setattr(sandbox, "GONE_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", program]) as left:
        try:
            sandbox.await_running(name, 1)
            assert sandbox.left_over(name, os.getpid()) == 1
        finally:
            left.kill()
    assert sandbox.left_over(name, os.getpid()) == 0


@pytest.mark.parametrize(("left", "status"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("more", [[], ["--quick"]])
def test_it_fails_if_a_process_is_left(
    monkeypatch: pytest.MonkeyPatch, left: int, status: int, more: list[str]
) -> None:
    fast = Ratio("sandboxed programs per second / 50", 2.0, 1.0, at_least=True)
    monkeypatch.setattr(sandbox, "measure", lambda *_: [fast, sandbox.kill(1, 1)])
    for way in ("left_after_limit", "left_after_close"):
        monkeypatch.setattr(sandbox, way, lambda slots: 0)
    monkeypatch.setattr(sandbox, "left_after_owner", lambda slots: left)
    monkeypatch.setattr(sys, "argv", ["sandbox.py", *more])
    assert sandbox.main() == status
