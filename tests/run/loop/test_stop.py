"""SIGINT and SIGTERM to a rank: the first is a request, a second one an end, whatever the main thread does."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.common.process.processes import ProcessId
from megarl.common.rundir.run_files import ExitRecord, read_exit
from megarl.common.rundir.run_lock import Holder, claim
from megarl.run.loop import stop
from megarl.run.loop.stop import StopSignals
from tests.support.checkout import environment
from tests.support.waiting import wait_until

# A rank whose main thread does something in a phase: it waits in C as in a collective, for a lock as for another
# thread, for a child process, in a file that does not answer as on a file server, or computes in Python.
RANK = """
import ctypes, os, subprocess, sys, threading
from pathlib import Path
from megarl.common.process.output import redirect_output
from megarl.run.loop.stop import StopSignals, end_before_start
run_dir, phase, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def compute():
    while True:
        pass

def wait_for_file():
    os.mkfifo(run_dir / "fifo")
    open(run_dir / "fifo", "rb")

waits = {
    "collective": lambda: ctypes.CDLL(None).usleep(300_000_000),
    "lock": lambda: threading.Lock().acquire() and threading.Event().wait(),
    "child": lambda: subprocess.run(["sleep", "300"]),
    "file": wait_for_file,
    "python": compute,
}
end_before_start(speaks=True)
terminal = sys.stderr
if phase != "configured":
    terminal = redirect_output(run_dir / "log")
if phase not in ("configured", "redirected"):
    signals = StopSignals(run_dir, run_dir / "checkpoints", terminal, speaks=True)
    signals.install()
if phase == "running":
    signals.run_has_begun()
(run_dir / "up").touch()
for _ in range(3):
    waits[what]()
"""
WAITS = ("collective", "lock", "child", "file", "python")


def start(run_dir: Path, phase: str, what: str = "collective") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(run_dir), phase, what], env=environment(), text=True, stderr=subprocess.PIPE
    )
    wait_until((run_dir / "up").exists, 60, "the rank")
    time.sleep(0.2)  # it waits by then
    return process


def save(run_dir: Path, step: int) -> None:
    directory = run_dir / "checkpoints" / f"iter_{step:07d}"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(json.dumps({}))


@pytest.mark.parametrize(
    "what", [each if each in ("collective", "child") else pytest.param(each, marks=pytest.mark.slow) for each in WAITS]
)
def test_ctrl_c_twice_in_a_running_rank(tmp_path: Path, what: str) -> None:
    process = start(tmp_path, "running", what)
    try:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        asked = process.stderr.readline()  # by now the time of the first signal is known
        time.sleep(stop.SAME_REQUEST_S + 0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()
    [ended] = process.stderr.read().splitlines()
    assert asked == "megarl: finishing the step, saving; again to abort\n"
    assert ended == (
        "megarl: aborted by a second stop signal (SIGINT); the same command starts again: nothing is saved"
    )
    assert read_exit(tmp_path) == ExitRecord("failed", 0, "aborted by a second stop signal (SIGINT)")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("phase", "what"), [
    ("configured", "lock"), ("configured", "python"), ("redirected", "child"), ("redirected", "file"),
    ("starting", "collective"), ("starting", "python"),
])  # fmt: skip
def test_a_rank_that_has_not_begun_ends_with_the_first_signal_and_says_one_thing(
    tmp_path: Path, phase: str, what: str, number: signal.Signals
) -> None:
    process = start(tmp_path, phase, what)
    try:
        process.send_signal(number)
        process.send_signal(number)  # the same Ctrl-C, through torchrun
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()
    assert process.stderr is not None
    [said] = process.stderr.read().splitlines()
    assert said.startswith(f"megarl: {number.name} ") and "the same command " in said


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StopSignals:
    """A rank that notes its exit code in `codes` instead of ending; `now[0]` is the time."""
    now, codes = [100.0], list[int]()
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stop, "REPORT_S", 0.0)
    made = StopSignals(tmp_path, tmp_path / "checkpoints", io.StringIO(), speaks=True)
    made._exit = codes.append
    made.now, made.codes = now, codes  # type: ignore[attr-defined]
    return made


def said(rank: StopSignals) -> str:
    assert isinstance(rank._terminal, io.StringIO)
    return rank._terminal.getvalue()


def test_one_ctrl_c_that_arrives_twice_is_one_request(rank: StopSignals) -> None:
    rank._running = True
    rank.receive(signal.SIGINT)
    rank.now[0] += 0.5  # type: ignore[attr-defined]
    rank.receive(signal.SIGINT)
    assert rank.raised and rank.name == "SIGINT" and rank.codes == [] and said(rank).count("megarl: ") == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_the_end_says_where_the_next_run_resumes(
    tmp_path: Path, rank: StopSignals, numbers: tuple[signal.Signals, ...]
) -> None:
    save(tmp_path, 4)
    rank._running = True
    for number in numbers:
        rank.receive(number)
        rank.now[0] += 2.0  # type: ignore[attr-defined]
    assert rank.codes == [1]  # type: ignore[attr-defined]
    assert said(rank).endswith(
        "megarl: aborted by a second stop signal (SIGTERM); the same command resumes after step 4\n"
    )
    assert read_exit(tmp_path) == ExitRecord("failed", 4, "aborted by a second stop signal (SIGTERM)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_starts_ends_with_the_first_signal(
    tmp_path: Path, rank: StopSignals, number: signal.Signals
) -> None:
    rank.receive(number)
    assert rank.codes == [1] and not rank.raised  # type: ignore[attr-defined]
    failed = f" (torchrun sends it also if another rank has failed: see {tmp_path / 'logs'})"
    why = f"{number.name} while the run was starting{failed if number == signal.SIGTERM else ''}"
    assert said(rank) == f"megarl: {why}; the same command starts again: nothing is saved\n"


def test_the_end_leaves_no_trace_in_a_directory_that_another_run_has_taken(tmp_path: Path, rank: StopSignals) -> None:
    """The error.txt of that run does not keep the message from the terminal either."""
    rank._mine = Holder.here("torchrun", ProcessId.of(1))
    (tmp_path / "error.txt").write_text("of the other run")
    claim(tmp_path, Holder.here("megarl launch", ProcessId.own(), launch="another"), node_s=1.0)
    rank._running = True
    for _ in range(2):
        rank.receive(signal.SIGINT)
        rank.now[0] += 2.0  # type: ignore[attr-defined]
    assert rank.codes == [1] and read_exit(tmp_path) is None  # type: ignore[attr-defined]
    assert f"{tmp_path} was taken by megarl launch (pid" in said(rank).splitlines()[-1]


def test_after_the_failure_of_another_rank_nothing_is_said(tmp_path: Path, rank: StopSignals) -> None:
    """torchrun then ends the others by SIGTERM."""
    (tmp_path / "error.txt").write_text("megarl: the cause")
    rank.receive(signal.SIGTERM)
    assert rank.codes == [1] and said(rank) == ""  # type: ignore[attr-defined]
