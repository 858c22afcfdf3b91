"""A job that is started again by the same command after a fault has ended it, as often as the faults allow."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak_job
from benchmarks.soak_job import run_job
from benchmarks.soak_job_ends import JobEnds
from tests.support.waiting import wait_until


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started; each ends with the next of `codes`."""
    started: list[list[str]] = []

    def run_once(command: list[str], log: Path, until: float, timeout_s: float, env: Mapping[str, str]) -> int:
        started.append(command)
        log.write_text(f"the output of start {len(started)}")
        return codes.pop(0)

    codes = [-9, 1, 0]
    monkeypatch.setattr(soak_job, "_run_once", run_once)
    monkeypatch.setattr(soak_job, "processes_left", lambda run_dir, within_s: [])
    monkeypatch.setattr(soak_job, "step_records", lambda run_dir: [{"step": 1}])
    return started


def run(directory: Path, starts: int, said: list[str]) -> list[dict[str, Any]]:
    config = {"run": {"dir": str(directory / "run")}}
    return run_job(config, ranks=2, restarts=3, starts=starts, timeout_s=60.0, say=said.append)


def test_a_job_that_a_fault_has_ended_is_started_again_by_the_same_command(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    said: list[str] = []
    assert run(tmp_path, 2, said) == [{"step": 1}]
    assert len(commands) == 3 and commands[0] == commands[1] == commands[2]
    assert commands[0][commands[0].index("--max-restarts") + 1] == "3"
    assert [text[:32] for text in said] == ["the job has ended with code -9, ", "the job has ended with code 1, l"]


def test_a_job_that_a_stop_request_has_ended_is_started_again(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_once(command: list[str], log: Path, until: float, timeout_s: float, env: Mapping[str, str]) -> int:
        commands.append(command)
        log.write_text("")
        (tmp_path / "run").mkdir(exist_ok=True)
        status = "preempted" if len(commands) == 1 else "finished"
        (tmp_path / "run" / "exit.json").write_text(json.dumps({"status": status}))
        return 0

    monkeypatch.setattr(soak_job, "_run_once", run_once)
    assert run(tmp_path, 1, []) == [{"step": 1}] and len(commands) == 2


def test_a_job_that_ends_too_often_has_failed(tmp_path: Path, commands: list[list[str]]) -> None:
    with pytest.raises(SystemExit, match="run failed:\nthe output of start 2"):
        run(tmp_path, 1, [])


def test_a_job_that_leaves_processes_is_not_started_again(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_job, "processes_left", lambda run_dir, within_s: ["sleep (pid 7)"])
    with pytest.raises(SystemExit, match=r"run ended with code -9 and left sleep \(pid 7\)"):
        run(tmp_path, 2, [])
    assert len(commands) == 1


def test_a_job_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"run did not end within 1 s; see .*run.log"):
        soak_job._run_once(["sleep", "600"], tmp_path / "run.log", 0.0, 1.0, os.environ)


def test_whoever_looks_at_the_end_of_a_job_is_told_its_code_before_the_next_start(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    told: list[tuple[int, int]] = []
    config = {"run": {"dir": str(tmp_path / "run")}}
    run_job(
        config, ranks=2, restarts=0, starts=2, timeout_s=60.0, say=lambda text: None,
        ended=lambda code: told.append((code, len(commands))),
    )  # fmt: skip
    assert told == [(-9, 1), (1, 2), (0, 3)]


def test_the_next_start_waits_until_a_fault_has_looked_at_the_end_of_the_job() -> None:
    ends, started = JobEnds(), threading.Event()
    ends.ended(7)  # of another fault, which nobody looks at

    def job() -> None:
        ends.ended(1)
        started.set()

    with ends.awaited() as code:
        assert code() is None, "it has not ended since"
        thread = threading.Thread(target=job, daemon=True)
        thread.start()
        wait_until(lambda: code() == 1, 10, "the code")
        assert not started.wait(0.2)
    assert started.wait(10)
    thread.join(10)


def test_a_fault_that_goes_wrong_holds_no_start_back() -> None:
    ends = JobEnds()
    with pytest.raises(ValueError, match="it went wrong"), ends.awaited():
        raise ValueError("it went wrong")
    ends.ended(1)
