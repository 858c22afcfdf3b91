"""The files that a failed run leaves for those who ask how it ended."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

from megarl.common import run_files
from megarl.common.run_files import ExitRecord
from megarl.run.failure import FailureReport


def test_a_failure_writes_exit_json_with_the_steps_that_were_done(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 7, "exit": "running"}')
    with (tmp_path / "terminal").open("w") as terminal:
        FailureReport(tmp_path, rank=1).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert run_files.read_exit(tmp_path) == ExitRecord("failed", 7, "no such thing")


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_the_terminal_has_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", full_disk)
    monkeypatch.setattr(Path, "write_text", full_disk)
    terminal = io.StringIO()
    assert FailureReport(tmp_path, rank=0).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert terminal.getvalue().startswith("megarl: no such thing\n")
    assert "could not all be written to" in terminal.getvalue()


def test_the_reserve_makes_room_for_the_exit_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full until the run gives up what it has reserved."""
    run_files.make_reserve(tmp_path)
    reserve, real = tmp_path / run_files.RESERVE_FILE, Path.write_text

    def write(path: Path, *arguments: object, **options: object) -> int:
        if reserve.exists():
            full_disk()
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", write)
    terminal = io.StringIO()
    FailureReport(tmp_path, rank=0).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert run_files.read_exit(tmp_path) == ExitRecord("failed", 0, "no such thing")
    assert (tmp_path / "error.txt").read_text().startswith("megarl: no such thing")
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == "failed"
    assert terminal.getvalue().count("megarl: ") == 1


def test_the_error_of_an_earlier_run_silences_nobody_and_one_of_this_run_does(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_text("megarl: long ago")
    os.utime(tmp_path / "error.txt", (1, 1))
    reports = [FailureReport(tmp_path, rank) for rank in (0, 1)]
    first, second = io.StringIO(), io.StringIO()
    assert reports[0].claim(ValueError("now"), first, tmp_path / "log")
    assert not reports[1].claim(ValueError("a consequence"), second, tmp_path / "log")
    assert "now" in first.getvalue() and second.getvalue() == ""
