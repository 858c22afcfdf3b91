"""torchrun with megarl's rendezvous: what a rank has told is all that the user sees."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

from megarl.cluster.nodes.torchrun_logs import keep_no_logs
from tests.support.checkout import ROOT, environment

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
KILLED = r"megarl: rank 0 was killed by SIGKILL \(pid \d+\), and the others were ended\n"
# What torchrun logs before it asks for a rendezvous. `megarl train` has it silenced by then.
BEFORE = r"(.*master_addr is only used for static rdzv_backend .*\n)?"


@pytest.mark.parametrize(
    ("module", "how", "code", "told"),
    [
        ("megarl.cluster.nodes.torchrun", "refused", 2, REFUSED),
        ("megarl.cluster.nodes.torchrun", "killed", 1, KILLED),
        ("torch.distributed.run", "refused", 1, BEFORE + REFUSED),
        ("torch.distributed.run", "killed", 1, BEFORE + KILLED),
    ],
)
def test_a_rank_that_fails_is_told_once(tmp_path: Path, module: str, how: str, code: int, told: str) -> None:
    """Under torchrun as `megarl train` starts it, and under one that the user starts. Neither leaves a file."""
    script, temporary = tmp_path / "rank.py", tmp_path / "temporary"
    script.write_text(RANK)
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", module, "--rdzv-backend", "megarl", "--nproc-per-node", "2", str(script), how],
        cwd=ROOT, env=environment(TMPDIR=str(temporary)), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert re.fullmatch(told, done.stderr), done.stderr
    assert not list(temporary.iterdir())


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


@pytest.mark.parametrize(
    ("module", "code"), [("megarl.cluster.nodes.torchrun", 128 + signal.SIGINT), ("torch.distributed.run", 1)]
)
def test_ctrl_c_is_told_by_the_ranks_alone(tmp_path: Path, module: str, code: int) -> None:
    script, ready = tmp_path / "rank.py", tmp_path / "ready"
    script.write_text(STOPPED)
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--rdzv-backend", "megarl", str(script), str(ready)],
        cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == code
    assert re.fullmatch(BEFORE + r"megarl: finishing the step, saving\n", told), told


@pytest.mark.parametrize(
    ("asked", "kept"),
    [({}, False), ({"log_dir": "mine"}, True), ({"redirects": Std.ALL}, True), ({"tee": Std.OUT}, True)],
)
def test_torchrun_has_a_directory_only_if_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], kept: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DefaultLogsSpecs, "reify", DefaultLogsSpecs.reify)  # undone after the test
    keep_no_logs()
    rank: dict[str, str] = {}
    specs = DefaultLogsSpecs(**asked)
    assert list(tmp_path.iterdir()), "torch makes no directory: ours is not needed"
    files = specs.reify({0: rank})
    assert bool(list(tmp_path.iterdir())) == bool(rank["TORCHELASTIC_ERROR_FILE"]) == kept
    assert (files.error_files[0] == os.devnull) != kept


def test_another_error_of_torchrun_keeps_its_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from megarl.cluster.nodes.failed_ranks import replace_report\n"
         "replace_report()\nraise LookupError('another')"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr and "LookupError: another" in done.stderr
