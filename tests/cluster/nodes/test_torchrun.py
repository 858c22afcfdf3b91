"""torchrun as `megarl train` starts it: what a rank has told is all that the user sees."""

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


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("refused", 2, r"megarl: model\.path: no such directory\n"),
        ("killed", 1, r"megarl: rank 0 was killed by SIGKILL \(pid \d+\), and the others were ended\n"),
    ],
)
def test_a_rank_that_fails_is_told_once(tmp_path: Path, how: str, code: int, told: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "megarl.cluster.nodes.torchrun", "--rdzv-backend", "megarl"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), how],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert re.fullmatch(told, done.stderr), done.stderr
