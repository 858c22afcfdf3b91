"""The guardian kills what a killed supervisor has left, and nothing else."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster.pool import guardian
from megarl.common.process.processes import ProcessId, descendants, is_alive
from megarl.common.rundir.private_directory import make_private_directory
from tests.support.waiting import wait_until

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


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
        each.wait(timeout=60)


def write_state(path: Path, supervisor: ProcessId, children: list[ProcessId]) -> None:
    path.write_text(json.dumps({"process": asdict(supervisor), "children": [asdict(child) for child in children]}))


PATIENCE_S = 1.0


def arguments_of(state_file: Path, private: Path, supervisor: ProcessId, agent: ProcessId | None = None) -> list[str]:
    agent = agent or ProcessId.own()
    numbers = (supervisor.pid, supervisor.start_time, agent.pid, agent.start_time, PATIENCE_S)
    return [str(state_file), str(private), *map(str, numbers)]


def run_guardian(
    state_file: Path, supervisor: ProcessId, monkeypatch: pytest.MonkeyPatch, agent: ProcessId | None = None
) -> None:
    private = make_private_directory()
    monkeypatch.setattr(sys, "argv", ["guardian", *arguments_of(state_file, private, supervisor, agent)])
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
    arguments = arguments_of(tmp_path / "state.json", private, identity)
    process = subprocess.Popen([sys.executable, "-m", "megarl.cluster.pool.guardian", *arguments])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=4 * guardian.POLL_S)
        assert is_alive(child) and private.is_dir()
        supervisor.kill()
        wait_until(lambda: not is_alive(child), 60, "the guardian to kill the child")
        assert process.wait(timeout=60) == 0
        assert not private.exists()
    finally:
        process.kill()
        process.wait(timeout=60)


# Starts a child, and does not end by itself.
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"


def test_a_supervisor_that_outlives_its_agent_is_killed_with_everything_below_it(
    start: Callable[[], subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watch is stuck: its state file is not even there, for example because the disk was full."""
    agent = start()
    stuck = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert stuck.stdout is not None and stuck.stdout.readline() == b"up\n"
    supervisor, launcher = ProcessId.of(stuck.pid), ProcessId.of(agent.pid)
    (child,) = descendants(stuck.pid)
    stuck.send_signal(signal.SIGSTOP)
    agent.kill()
    try:
        run_guardian(tmp_path / "missing.json", supervisor, monkeypatch, launcher)
        assert not is_alive(supervisor) and not is_alive(child)
    finally:
        stuck.kill()
        stuck.wait(timeout=60)


def test_a_supervisor_has_its_patience_to_end_the_pool_after_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(guardian, "time", clock)
    guardian.wait_for_end(ProcessId.own(), ProcessId(1, -1), PATIENCE_S)
    assert PATIENCE_S < now[0] <= PATIENCE_S + 2 * guardian.POLL_S


def test_children_that_were_seen_are_killed_without_a_state_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is killed, and could not write its children down."""
    killed = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline() == b"up\n"
    supervisor = ProcessId.of(killed.pid)
    (child,) = descendants(killed.pid)

    def seen(pid: int) -> set[ProcessId]:
        found = descendants(pid)
        killed.kill()  # as soon as it has looked once
        killed.wait(timeout=60)
        return found

    monkeypatch.setattr(guardian, "descendants", seen)
    run_guardian(tmp_path / "missing.json", supervisor, monkeypatch)
    assert not is_alive(child)
