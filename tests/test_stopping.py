"""The stop file, SIGTERM and exit.json, without a run; tests/e2e/test_train.py has the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megarl.common import run_files as stopping
from megarl.common.run_files import ExitRecord
from megarl.run.failure import FailureReport


def test_the_first_reason_stays_until_it_is_forgotten(tmp_path: Path) -> None:
    assert stopping.stop_reason(tmp_path) is None and stopping.read_exit(tmp_path) is None
    stopping.ask_to_stop(tmp_path, "time limit")
    stopping.ask_to_stop(tmp_path, "SIGTERM")
    assert stopping.stop_reason(tmp_path) == "time limit"
    stopping.write_exit(tmp_path, ExitRecord("preempted", 3, "time limit"))
    assert stopping.read_exit(tmp_path) == ExitRecord("preempted", 3, "time limit")
    stopping.forget(tmp_path)
    assert stopping.stop_reason(tmp_path) is None and stopping.read_exit(tmp_path) is None
    stopping.forget(tmp_path)


def test_a_stop_file_made_by_touch_counts(tmp_path: Path) -> None:
    (tmp_path / stopping.STOP_FILE).touch()
    assert stopping.stop_reason(tmp_path) == "asked to stop"


def test_sigterm_is_remembered_and_ends_nothing() -> None:
    flag = stopping.TerminationFlag()
    before = signal.getsignal(signal.SIGTERM)
    try:
        flag.install()
        assert not flag.raised
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.raised
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_failure_writes_exit_json_with_the_steps_that_were_done(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 7, "exit": "running"}')
    with (tmp_path / "terminal").open("w") as terminal:
        FailureReport(tmp_path, rank=1).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert stopping.read_exit(tmp_path) == ExitRecord("failed", 7, "no such thing")
