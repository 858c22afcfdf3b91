"""The launcher's side: state file, waiting for it, stopping; without Ray."""

import errno
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megarl.cluster.pool import pool_process as launch
from megarl.common.clocks import RateLimit
from megarl.common.errors import PoolEnded, SupervisorFailed
from megarl.common.process.processes import ProcessId, is_alive
from tests.support.trainer.configs import config

GONE = ProcessId(1, -1)


@pytest.fixture(autouse=True)
def _fresh_complaints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_complaints", RateLimit(30.0))


def state(process: ProcessId, **changes: object) -> dict[str, object]:
    return {
        "state": "starting", "error": None, "address": "", "attempt": 4, "launch_id": "abc", "children": [],
        "host": platform.node(),
        "process": asdict(process), "agent": asdict(GONE), **changes,
    }  # fmt: skip


def test_torchrun_variables_do_not_reach_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_NAME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "kept")
    clean = launch.clean_environment()
    assert clean["HF_HOME"] == "kept"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_NAME"} & set(clean)


def handle(run_dir: Path) -> launch.SupervisorHandle:
    return launch.SupervisorHandle(str(run_dir), "a:1", "n", "p", 0, "abc", ProcessId.own(), platform.node())


def test_a_start_that_is_interrupted_ends_the_supervisor_that_nobody_has_a_handle_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the head starts; the supervisor is a process that would sleep for a minute."""
    chosen = config(tmp_path / "model")
    stopped: list[tuple[int, float]] = []
    sleepers: list[subprocess.Popen[bytes]] = []

    def start(config_json: str, run_dir: Path, agent_pid: int, launch_id: str, **options: object) -> None:
        sleepers.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        launch._STARTED[launch_id] = sleepers[0]

    def attach(*args: object) -> launch.SupervisorHandle:
        raise KeyboardInterrupt

    def stop(run_dir: Path, process: ProcessId, launch_id: str, timeout_s: float) -> None:
        stopped.append((process.pid, timeout_s))
        launch._STARTED.pop(launch_id).kill()

    monkeypatch.setattr(launch, "start_supervisor", start)
    monkeypatch.setattr(launch, "attach_supervisor", attach)
    monkeypatch.setattr(launch, "stop_supervisor", stop)
    with pytest.raises(KeyboardInterrupt):
        launch.launch_supervisor(chosen.model_dump_json(), tmp_path, os.getpid())
    assert stopped == [(sleepers[0].pid, chosen.timeouts.shutdown_s)]
    sleepers[0].wait(60)


def test_only_the_same_agents_ready_pool_of_the_same_config_is_kept(tmp_path: Path) -> None:
    """A restarted rank 0 goes on with the pool; another torchrun, or another config, does not."""
    own = ProcessId.own()
    (tmp_path / "logs").mkdir()
    spec = launch.SupervisorSpec("{}", str(tmp_path), own, "abc", 4, "/", cuda=False)
    spec.save(tmp_path / "logs" / launch.SPEC_FILE)
    names = {"address": "a:1", "namespace": spec.namespace, "partition": spec.partition, "agent": asdict(own)}
    ready = state(own, state="ready", **names)

    def kept(config: str = "{}", agent_pid: int = own.pid, **changes: object) -> str | None:
        launch.write_state(tmp_path, {**ready, **changes})
        return launch._kept_supervisor(tmp_path, agent_pid, config)

    assert kept() == "abc"
    assert kept(config='{"other": 1}') is None
    assert kept(agent_pid=os.getppid()) is None
    assert kept(agent=asdict(ProcessId(own.pid, own.start_time + 1))) is None
    assert kept(state="starting") is None
    assert kept(state="stopping") is None
    assert kept(process=asdict(GONE)) is None
    (tmp_path / launch.STOP_FILE).touch()
    assert kept() is None


@pytest.mark.parametrize("end", ["two looks", "one look", "failed", "killed", "silent"])
def test_a_kept_pool_is_used_again_only_if_it_is_looked_at_after_the_failure(tmp_path: Path, end: str) -> None:
    """A look that had begun before the failure may have found a controller alive that has died since."""
    own = ProcessId.own()
    looks = {"two looks": 2, "one look": 1}.get(end, 0)

    def go_on() -> None:
        for number in range(1, looks + 1):
            time.sleep(0.1)
            launch.write_state(tmp_path, state(own, state="ready", heartbeats=7 + number))
        if end == "failed":
            launch.write_state(tmp_path, state(own, state="failed", error="storage 0 has died"))
        if end == "killed":
            launch.write_state(tmp_path, state(GONE, state="ready", heartbeats=7))

    launch.write_state(tmp_path, state(own, state="ready", heartbeats=7))
    supervisor = threading.Timer(0.1, go_on)
    supervisor.start()
    assert launch._is_sound(tmp_path, "abc", 60.0 if end == "two looks" else 1.0) == (end == "two looks")
    supervisor.join()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": "ready"}, None),
        ({"state": "stopping", "error": "the launcher is gone"}, "has ended: the launcher is gone; see"),
        ({"state": "failed", "error": "out of memory"}, "has ended: out of memory; see"),
        ({"state": "ready", "launch_id": "xyz"}, r"has ended: another launch \(xyz\) has begun in"),
        (None, "has ended: its supervisor was killed; see"),
    ],
)
def test_a_wait_for_the_pool_learns_why_it_has_ended(
    tmp_path: Path, changes: dict[str, object] | None, message: str | None
) -> None:
    if changes is not None:
        launch.write_state(tmp_path, state(ProcessId.own(), **changes))
    with pytest.raises(PoolEnded, match=message) if message else nullcontext():
        handle(tmp_path).check()


def test_a_state_that_cannot_be_read_does_not_end_a_living_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(run_dir: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(launch, "read_state", read)
    handle(tmp_path).check()
    assert "the state of the rollout pool cannot be read now; reading it again: [Errno 116] Stale" in caplog.text
    with pytest.raises(PoolEnded, match="its supervisor was killed"):
        replace(handle(tmp_path), process=GONE).check()


@pytest.mark.parametrize(
    ("process", "changes", "message"),
    [
        (ProcessId.own(), {"state": "failed", "error": "engine replica 0: no memory"}, "failed: engine replica 0: no"),
        (ProcessId.own(), {"state": "stopping", "error": "SIGTERM", "address": "a:1"}, "is stopping: SIGTERM"),
        (GONE, {}, "the supervisor died"),
    ],
)
def test_a_pool_that_ends_is_not_waited_for(
    tmp_path: Path, process: ProcessId, changes: dict[str, object], message: str
) -> None:
    launch.write_state(tmp_path, state(process, **changes))
    with pytest.raises(SupervisorFailed, match=message):
        launch.wait_ready(handle(tmp_path), timeout_s=5)
    with pytest.raises(SupervisorFailed, match=message):
        launch.attach_supervisor(tmp_path, "abc", timeout_s=5)


def test_waiting_is_bounded_and_says_where_it_stands(tmp_path: Path) -> None:
    launch.write_state(tmp_path, state(ProcessId.own()))
    with pytest.raises(SupervisorFailed, match="waited 0 s for the supervisor, which is still in state 'starting'"):
        launch.wait_ready(handle(tmp_path), timeout_s=0.1)
    launch.write_state(tmp_path, state(ProcessId.own(), state="ready", launch_id="another"))
    with pytest.raises(SupervisorFailed, match="waited 0 s"):
        launch.wait_ready(handle(tmp_path), timeout_s=0.1)


def failing_reads(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[OSError]:
    """Make as many reads of the state fail as a file server may that restarts; return the failures that are left."""
    left = [OSError(errno.ESTALE, "Stale file handle") for _ in range(failures)]
    real = launch.read_state

    def read(run_dir: Path) -> dict[str, object] | None:
        if left:
            raise left.pop()
        return real(run_dir)

    monkeypatch.setattr(launch, "read_state", read)
    return left


def test_a_wait_goes_on_while_the_state_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"namespace": "megarl-abc", "partition": "run-abc.4"}
    launch.write_state(tmp_path, state(ProcessId.own(), state="ready", rebuilds=1, **names))
    left = failing_reads(monkeypatch, 3)
    assert launch.wait_ready(handle(tmp_path), timeout_s=30).rebuilds == 1 and not left
    assert caplog.text.count("cannot be read now; reading it again: [Errno 116] Stale file handle") == 1
    left += [OSError(errno.EIO, "Input/output error")]
    assert launch.await_rebuilt(handle(tmp_path), timeout_s=30).rebuilds == 1 and not left
    failing_reads(monkeypatch, 1000)
    with pytest.raises(SupervisorFailed, match="which may have written its state, which cannot be read; see"):
        launch.wait_ready(handle(tmp_path), timeout_s=0.1)


def test_a_start_reads_the_state_of_the_attempt_before_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.write_state(tmp_path, state(GONE, agent=asdict(ProcessId.own())))
    left = failing_reads(monkeypatch, 2)
    assert launch._kept_supervisor(tmp_path, os.getpid(), "") is None and not left
    left += [OSError(errno.ESTALE, "Stale file handle")]
    assert launch._retire_previous(tmp_path) == 4 and not left
    left += [OSError(errno.ESTALE, "Stale file handle")] * 100
    with pytest.raises(OSError, match="Stale"):
        launch.read_state_again(tmp_path, timeout_s=0.2)


def test_a_deaf_supervisor_is_killed_with_its_recorded_children(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    pair = [subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) for _ in range(2)]
    for each in pair:
        assert each.stdout is not None and each.stdout.readline()
    supervisor, child = (ProcessId.of(each.pid) for each in pair)
    launch.write_state(tmp_path, state(supervisor, children=[asdict(child)]))
    launch.stop_supervisor(tmp_path, supervisor, "abc", timeout_s=0.2)
    assert (tmp_path / launch.STOP_FILE).read_text() == "abc"
    assert not is_alive(supervisor) and not is_alive(child)
    for each in pair:
        each.wait(timeout=60)


@pytest.mark.parametrize("host", [None, "elsewhere"])
def test_a_supervisor_whose_directory_is_another_runs_is_ended_without_a_trace(
    tmp_path: Path, host: str | None
) -> None:
    """A stop file would cost the other run its pool at the next restart of its ranks."""
    mine, theirs = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    try:
        launch.write_state(
            tmp_path, state(ProcessId.own(), launch_id="xyz", children=[asdict(ProcessId.of(theirs.pid))])
        )
        before = (tmp_path / launch.STATE_FILE).read_text()
        launch.stop_supervisor(tmp_path, ProcessId.of(mine.pid), "abc", timeout_s=600, host=host)
        assert (mine.poll() is None) == (host is not None)
        assert theirs.poll() is None and [path.name for path in tmp_path.iterdir()] == [launch.STATE_FILE]
        assert (tmp_path / launch.STATE_FILE).read_text() == before
    finally:
        for process in (mine, theirs):
            process.kill()
            process.wait(timeout=60)


def test_a_state_that_cannot_be_read_does_not_keep_a_supervisor_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "read_state", lambda run_dir: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale")))
    process = subprocess.Popen(["sleep", "600"])
    launch.stop_supervisor(tmp_path, ProcessId.of(process.pid), "abc", timeout_s=0.1)
    assert process.wait(timeout=60) in {-signal.SIGTERM, -signal.SIGKILL}  # a slow one gets both


def test_a_run_directory_of_a_dead_run_is_taken_over_with_the_next_attempt(tmp_path: Path) -> None:
    assert launch._retire_previous(tmp_path) == -1
    launch.write_state(tmp_path, state(GONE, agent=asdict(ProcessId.own())))
    (tmp_path / launch.STOP_FILE).write_text("old")
    assert launch._retire_previous(tmp_path) == 4
    assert not (tmp_path / launch.STOP_FILE).exists()


def test_a_long_wait_for_the_engines_is_reported_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "REPORT_S", 0.2)
    launch.write_state(tmp_path, state(ProcessId.own()))
    message: list[str] = []

    def report(text: str) -> None:
        message.append(text)
        if len(message) == 2:
            launch.write_state(tmp_path, state(ProcessId.own(), state="ready", namespace="n", partition="p"))

    launch.wait_ready(handle(tmp_path), 30, report)
    assert len(message) == 2
    assert all(
        each.startswith("still waiting for the rollout engines (") and "of at most 30;" in each for each in message
    )
