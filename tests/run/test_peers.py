"""Ranks that torchrun starts again find each other, and not the addresses of the dead."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.checkout import environment, torchrun

# The killed rank 0 comes late to the second attempt, so that rank 1 is the first to look for it.
RANK = """
import os, sys, time
import torch
from pathlib import Path
from megarl.run.peers import join_peers
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if (attempt, rank) == ("1", "0"):
    time.sleep(2)
join_peers("gloo", 60, Path(sys.argv[1]))
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
    command = torchrun(2, "--max-restarts", "3", str(program), str(tmp_path))
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("*.?")) == ["1.0", "1.1"]
