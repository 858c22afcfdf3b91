"""The guardian kills what a killed supervisor has left, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.cluster import guardian
from megarl.common.private_directory import make_private_directory
from megarl.common.processes import ProcessId, is_alive
from tests.support.waiting import wait_until

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def start() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """`start()` is a process that sleeps; it is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def one() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE))
        assert started[-1].stdout is not None and started[-1].stdout.readline() == b"up\n"
        return started[-1]

    yield one
    for each in started:
        each.kill()
        each.wait(timeout=10)


def write_state(path: Path, supervisor: ProcessId, children: list[ProcessId]) -> None:
    path.write_text(json.dumps({"process": asdict(supervisor), "children": [asdict(child) for child in children]}))


def run_guardian(state_file: Path, supervisor: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    private = make_private_directory()
    arguments = [str(state_file), str(supervisor.pid), str(supervisor.start_time), str(private)]
    monkeypatch.setattr(sys, "argv", ["guardian", *arguments])
    guardian.main()
    assert not private.exists()


def test_the_recorded_children_of_a_killed_supervisor_are_killed_and_others_are_not(
    start: Callable[[], subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, child, other = (ProcessId.of(start().pid) for _ in range(3))
    reused = ProcessId(other.pid, other.start_time - 1)  # a recorded child whose pid another process has now
    write_state(tmp_path / "state.json", supervisor, [child, reused])
    subprocess.run(["kill", "-9", str(supervisor.pid)], check=True)
    run_guardian(tmp_path / "state.json", supervisor, monkeypatch)
    assert not is_alive(child) and is_alive(other)


def test_a_later_launch_keeps_its_children(
    start: Callable[[], subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, later, child = (ProcessId.of(start().pid) for _ in range(3))
    write_state(tmp_path / "state.json", later, [child])
    subprocess.run(["kill", "-9", str(gone.pid)], check=True)
    run_guardian(tmp_path / "state.json", gone, monkeypatch)
    assert is_alive(child) and is_alive(later)


def test_nothing_is_killed_while_the_supervisor_lives(
    start: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """It waits, as the process of its own that it is; then it ends what is left."""
    supervisor = start()
    child, identity = ProcessId.of(start().pid), ProcessId.of(supervisor.pid)
    write_state(tmp_path / "state.json", identity, [child])
    private = make_private_directory()
    arguments = [str(tmp_path / "state.json"), str(identity.pid), str(identity.start_time), str(private)]
    process = subprocess.Popen([sys.executable, "-m", "megarl.cluster.guardian", *arguments])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=4 * guardian.POLL_S)
        assert is_alive(child) and private.is_dir()
        supervisor.kill()
        wait_until(lambda: not is_alive(child), 30, "the guardian to kill the child")
        assert process.wait(timeout=30) == 0
        assert not private.exists()
    finally:
        process.kill()
        process.wait(timeout=10)
