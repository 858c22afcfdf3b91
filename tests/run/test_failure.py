"""The files that a failed run leaves for those who ask how it ended."""

from __future__ import annotations

from pathlib import Path

from megarl.common import run_files
from megarl.common.run_files import ExitRecord
from megarl.run.failure import FailureReport


def test_a_failure_writes_exit_json_with_the_steps_that_were_done(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 7, "exit": "running"}')
    with (tmp_path / "terminal").open("w") as terminal:
        FailureReport(tmp_path, rank=1).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert run_files.read_exit(tmp_path) == ExitRecord("failed", 7, "no such thing")
