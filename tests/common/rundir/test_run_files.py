"""start.json, the stop file, SIGTERM and exit.json, without a run; tests/jobs has the runs."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from megarl.common.rundir import run_files
from megarl.common.rundir.run_files import ExitRecord, StartRecord


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
    with pytest.raises(run_files.ExitRecordError, match=r"exit\.json is damaged .* how the run ended is unknown"):
        run_files.read_exit(tmp_path)


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(
        ["git", *identity, "-C", str(directory), *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_a_start_names_the_commit_of_its_work_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run_files.write_start(run_dir, "cpu")
    written = run_files.read_start(run_dir)
    assert written == StartRecord(version("megarl"), "", platform.node(), "cpu"), "no work tree"
    git(tmp_path, "init")
    (tmp_path / "rewards.py").write_text("1\n")
    git(tmp_path, "add", "rewards.py")
    git(tmp_path, "commit", "-m", "x")
    git(tmp_path, "tag", "-a", "-m", "x", "v1")
    (tmp_path / "rewards.py").write_text("2\n")
    run_files.write_start(run_dir, "NVIDIA H200")
    written = run_files.read_start(run_dir)
    assert written is not None and written.commit == git(tmp_path, "rev-parse", "HEAD")[:12] + "-dirty"


def test_a_start_that_cannot_be_written_or_read_keeps_nothing_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    (tmp_path / "file").touch()
    run_files.write_start(tmp_path / "file", "cpu")
    assert run_files.read_start(tmp_path) is None
    (tmp_path / run_files.START_FILE).write_text('{"version": 1')
    assert run_files.read_start(tmp_path) is None
