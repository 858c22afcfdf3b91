"""torchrun with megarl's rendezvous: what a rank has told is all that the user sees."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    """Under torchrun as `megarl train` starts it, and under one that the user starts."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-m", module, "--rdzv-backend", "megarl", "--nproc-per-node", "2", str(script), how],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert re.fullmatch(told, done.stderr), done.stderr


def test_another_error_of_torchrun_keeps_its_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from megarl.cluster.nodes.failed_ranks import replace_report\n"
         "replace_report()\nraise LookupError('another')"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr and "LookupError: another" in done.stderr
