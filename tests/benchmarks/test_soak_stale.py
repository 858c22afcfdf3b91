"""Stale file handles by the preloaded library: for which files, which calls, and for how long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak_stale
from benchmarks.soak_stale import preloading, spoil, why_no_handles

# Each call prints the error that it gets, or "-".
PROGRAM = """
import os, sys
from pathlib import Path
run = Path(sys.argv[1])
for call in (
    lambda: (run / "claim.json").read_text(), lambda: os.stat(run / "stop"), lambda: os.lstat(run / "supervisor.json"),
    lambda: os.utime(run / "claim.json"), lambda: os.replace(run / "new", run / "supervisor.json"),
    lambda: os.open(run / "supervisor.json", os.O_RDONLY), lambda: (run / "metrics.jsonl").read_text(),
    lambda: (run / "sub" / "stop").write_text("x"), lambda: (run / "launch" / "1" / "node-0.json").write_text("x"),
):
    try:
        call()
        print("-")
    except OSError as error:
        print(error.errno)
"""
ESTALE = "116"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not there")


def answers(run_dir: Path, variables: dict[str, str]) -> list[str]:
    for name in ("claim.json", "stop", "supervisor.json", "new", "metrics.jsonl"):
        (run_dir / name).touch()
    for name in ("sub", "launch/1"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", PROGRAM, str(run_dir)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


def test_files_by_which_processes_find_each_other_are_stale_while_the_order_is_there(tmp_path: Path) -> None:
    run_dir, orders = tmp_path / "run", tmp_path / "run.orders"
    run_dir.mkdir()
    variables = preloading(run_dir, orders)
    during: list[str] = []

    def ask() -> bool:
        during.extend(answers(run_dir, variables))
        return True

    assert answers(run_dir, variables) == ["-"] * 9
    asked = {"claim.json": 2, "stop": 1, "supervisor.json": 3, "node-0.json": 1}
    assert spoil(orders, 60.0, ask) == asked
    assert during == [ESTALE] * 6 + ["-"] * 2 + [ESTALE]
    assert answers(run_dir, variables) == ["-"] * 9, "it is over"
    assert not spoil(orders, 0.0, lambda: True), "nobody has asked"
    assert answers(tmp_path / "run", {}) == ["-"] * 9


def test_a_library_before_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    assert preloading(tmp_path, tmp_path / "orders")["LD_PRELOAD"].endswith("stale.so:libm.so.6")


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_handles() == ""
    monkeypatch.setattr(soak_stale.shutil, "which", lambda name: None)
    assert why_no_handles() == "gcc, which compiles benchmarks/soak_stale.c, is not there"
