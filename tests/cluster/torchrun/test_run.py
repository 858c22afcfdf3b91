"""torchrun with megarl's rendezvous: what a rank has reported is all that the user sees."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousStateError

from megarl.cli.train import TORCHRUN
from megarl.cluster.torchrun import SERVED_BY_VARIABLE, rendezvous
from megarl.cluster.torchrun import run as agent
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_files
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE, Holder, claim
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE
from megarl.common.trust.signed_store import serve_store
from tests.support.checkout import ROOT, environment
from tests.support.waiting import wait_until

RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    time.sleep(600)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stderr.write("megarl: model.path: no such directory\\n")
sys.exit(2)
"""


REFUSED = r"megarl: model\.path: no such directory\n"
CLOSED = run_files.ExitRecord("failed", 7, "Connection closed by peer")
KILLED = r"megarl: rank 0 was killed by SIGKILL \(pid \d+\), and the others were ended\n"


@pytest.mark.parametrize(("how", "code", "message"), [("refused", 2, REFUSED), ("killed", 1, KILLED)])
def test_a_rank_that_fails_is_reported_once(tmp_path: Path, how: str, code: int, message: str) -> None:
    """Under torchrun as `megarl train` starts it, which leaves no file."""
    script, temporary = tmp_path / "rank.py", tmp_path / "temporary"
    script.write_text(RANK)
    temporary.mkdir()
    run_files.write_exit(tmp_path, CLOSED)  # as another rank has
    done = subprocess.run(
        [sys.executable, *TORCHRUN, "--nproc-per-node", "2", str(script), how],
        cwd=ROOT, env=environment(TMPDIR=str(temporary), **{RUN_DIR_VARIABLE: str(tmp_path)}), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert re.fullmatch(message, done.stderr), done.stderr
    assert not list(temporary.iterdir())
    record = run_files.read_exit(tmp_path)
    if how == "killed":
        assert record is not None and (record.status, record.step) == ("failed", 7)
        assert re.fullmatch(r"rank 0 was killed by SIGKILL .*ended: Connection closed by peer", record.reason)
    else:
        assert record == CLOSED


def test_the_record_of_another_run_that_holds_the_directory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `--force`: a rank of the run that has lost the directory is killed later."""
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    run_files.write_exit(tmp_path, CLOSED)
    held = claim(tmp_path, Holder.here("another run", ProcessId.of(os.getppid())), node_s=1.0)
    agent.record_failure("rank 0 was killed")
    assert run_files.read_exit(tmp_path) == CLOSED
    held.release()
    agent.record_failure("rank 0 was killed")
    assert run_files.read_exit(tmp_path) == replace(CLOSED, reason=f"rank 0 was killed: {CLOSED.reason}")


def test_a_strangers_state_is_the_reason_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise RendezvousStateError(rendezvous.FOREIGN_STATE)

    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(agent, "main", refused)
    monkeypatch.setattr(agent, "quieten_torchrun", lambda: None)
    assert agent.run() == 1
    assert capsys.readouterr().err == f"megarl: {rendezvous.FOREIGN_STATE}\n"
    assert run_files.read_exit(tmp_path) == run_files.ExitRecord("failed", 0, rendezvous.FOREIGN_STATE)


STOPPED = """
import pathlib, signal, sys, time

def stop(number, frame):
    sys.stderr.write("megarl: finishing the step, saving\\n")
    sys.exit(0)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_ctrl_c_is_told_by_the_ranks_alone(tmp_path: Path) -> None:
    script, ready = tmp_path / "rank.py", tmp_path / "ready"
    script.write_text(STOPPED)
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, str(script), str(ready)],
        cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, message = process.communicate(timeout=120)
    assert (process.returncode, message) == (128 + signal.SIGINT, "megarl: finishing the step, saving\n")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seconds that the agent of this process waits for its ranks at each stop."""
    waits: list[int] = []

    def shutdown(agent: object, death_sig: object = None, timeout: int = 30) -> None:
        waits.append(timeout)

    monkeypatch.setattr(rendezvous, "_shutdown", shutdown)
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", LocalElasticAgent._shutdown)  # restored after the test
    return waits


def test_after_its_first_stop_signal_torchrun_waits_as_long_as_its_ranks_have_reported(
    waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure, and after a second signal, torch calls it without one. A bound that the user chose holds."""
    store = serve_store("127.0.0.1", 0, 10.0)
    rendezvous.wait_for_ranks(store)
    agent: Any = object.__new__(LocalElasticAgent)
    rank = {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        SERVED_BY_VARIABLE: str(os.getppid()),
    }  # fmt: skip
    rendezvous.request_seconds_to_stop({**rank, SERVED_BY_VARIABLE: "1"}, 2100, 10.0)  # it is of another torchrun
    rendezvous.request_seconds_to_stop({**rank, "TORCHELASTIC_USE_AGENT_STORE": "False"}, 2100, 10.0)
    agent._shutdown(signal.SIGTERM)
    rendezvous.request_seconds_to_stop(rank, 2100, 10.0)
    agent._shutdown(signal.SIGTERM)
    agent._shutdown(signal.SIGTERM, timeout=5)
    agent._shutdown()
    rendezvous.request_seconds_to_stop(rank, 10**9, 10.0)
    agent._shutdown(signal.SIGTERM)
    store.set(rendezvous.STOP_KEY, "soon")
    agent._shutdown(signal.SIGTERM)
    assert waits == [30, 2100, 5, 30, rendezvous.MOST_STOP_S, 30]


SAVING = """
import os, pathlib, signal, sys, time
from megarl.cluster.torchrun.rendezvous import request_seconds_to_stop

def save(number, frame):
    time.sleep(35.0)  # torchrun's own bound is 30 s
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
request_seconds_to_stop(os.environ, 240, 60.0)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""


@pytest.mark.slow  # it waits longer than torchrun's own bound
def test_a_save_after_a_stop_signal_is_not_cut(tmp_path: Path) -> None:
    """Under a torchrun that the user has started. Without the wait it is: torch's bound is passed."""
    script, ready = tmp_path / "rank.py", tmp_path / "ready"
    script.write_text(SAVING)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "megarl", str(script), str(tmp_path)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: ready.exists() or process.poll() is not None, 240, "the rank")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert (tmp_path / "saved").exists(), output
