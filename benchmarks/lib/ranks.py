"""Benchmarks that measure in two trainer ranks: a script starts itself as these, and rank 0 writes what was found."""

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.lib.report import ROOT, new_parser
from benchmarks.lib.whole_run import environment

RANKS = 2
MEASURED = "measured.json"  # what rank 0 leaves in the directory


def ranks_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of such a script; `rank_of` is the directory of the measurement in a rank, None elsewhere."""
    parser = new_parser(doc)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser


def run_ranks(script: str, directory: Path, arguments: dict[str, object], timeout_s: float) -> dict[str, Any]:
    """Run the ranks of `benchmarks.SCRIPT` with these options; return what they have measured.

    Raises SystemExit with the end of their output if one fails, and TimeoutExpired.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", f"benchmarks.{script}"]
    command += ["--rank-of", str(directory), *(f"--{name}={value}" for name, value in arguments.items())]
    log = directory / "log"
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"a rank failed:\n{log.read_text()[-6000:]}")
    measured: dict[str, Any] = json.loads((directory / MEASURED).read_text())
    return measured


def join_ranks() -> None:
    """Make this process one of the ranks: its platform, one thread, and torch's process group."""
    import torch

    from megarl import platforms

    platform = platforms.activate(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(platform.backend, timeout=timedelta(seconds=600))
