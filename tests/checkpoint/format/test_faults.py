"""Fault points kill once, by a real SIGKILL, and nothing happens without the environment."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.checkpoint.format import faults


def pass_by(point: str, **env: str) -> int:
    code = f"from megarl.checkpoint.format import faults; faults.reached({point!r})"
    environment = {"PYTHONPATH": ".", **env}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=120).returncode


def test_each_point_kills_once(tmp_path: Path) -> None:
    env = {"MEGARL_KILL_AT": "shard,rename", "MEGARL_KILL_MARKS": str(tmp_path)}
    assert [pass_by("rename", **env) for _ in range(2)] == [-signal.SIGKILL, 0]
    assert pass_by("manifest", **env) == 0 and pass_by("rename") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rename"]


def test_an_unknown_point_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fault point"):
        faults.reached("somewhere")
