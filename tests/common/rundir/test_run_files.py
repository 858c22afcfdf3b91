"""The stop file, SIGTERM and exit.json, without a run; tests/jobs has the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.common.rundir import run_files
from megarl.common.rundir.run_files import ExitRecord


def test_the_first_reason_stays_until_it_is_forgotten(tmp_path: Path) -> None:
    assert run_files.stop_reason(tmp_path) is None and run_files.read_exit(tmp_path) is None
    run_files.ask_to_stop(tmp_path, "time limit")
    run_files.ask_to_stop(tmp_path, "SIGTERM")
    assert run_files.stop_reason(tmp_path) == "time limit"
    run_files.write_exit(tmp_path, ExitRecord("preempted", 3, "time limit"))
    assert run_files.read_exit(tmp_path) == ExitRecord("preempted", 3, "time limit")
    run_files.forget(tmp_path)
    assert run_files.stop_reason(tmp_path) is None and run_files.read_exit(tmp_path) is None
    run_files.forget(tmp_path)


def test_a_stop_file_made_by_touch_counts(tmp_path: Path) -> None:
    (tmp_path / run_files.STOP_FILE).touch()
    assert run_files.stop_reason(tmp_path) == "asked to stop"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b'{"status": "done", "step": 1, "reason": ""}', b'{"status": "failed"}']
)
def test_a_damaged_exit_record_is_one_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / run_files.EXIT_FILE).write_bytes(content)
    with pytest.raises(run_files.ExitRecordError, match=r"exit\.json is damaged .* nobody knows how the run ended"):
        run_files.read_exit(tmp_path)
