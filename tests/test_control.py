"""Ranks that torchrun starts again find each other, and not the addresses of the dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.run import ROOT

# The killed rank 0 comes late to the second attempt, so that rank 1 is the first to look for it.
RANK = """
import os, sys, time
import torch
from megarl.run.peers import join_peers
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if (attempt, rank) == ("1", "0"):
    time.sleep(2)
join_peers("gloo", 60)
torch.distributed.barrier()
if (attempt, rank) == ("0", "0"):
    os.kill(os.getpid(), 9)
torch.distributed.barrier()
with open(f"{sys.argv[1]}/{attempt}.{rank}", "w"):
    pass
"""


def test_restarted_ranks_find_their_peers(tmp_path: Path) -> None:
    """With `init_process_group("gloo")` in its place rank 1 calls the dead rank 0 and fails (torch 2.13)."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(program), str(tmp_path)]  # fmt: skip
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("*.?")) == ["1.0", "1.1"]
