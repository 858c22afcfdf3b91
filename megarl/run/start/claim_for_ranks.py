"""The claim of trainer ranks on RUN_DIR: no rank writes there before its run holds it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megarl.cluster.nodes.commands import LAUNCH_ID_VARIABLE
from megarl.common.process.processes import ProcessId
from megarl.common.rundir.run_lock import Holder, RunClaim, await_claim, claim
from megarl.common.timeouts import GRACE_S


def holder_for_ranks(what: str = "torchrun") -> Holder:
    """Return the holder of RUN_DIR that this rank belongs to: its launch, torchrun's agent, or the rank itself."""
    process = ProcessId.of(os.getppid()) if "RANK" in os.environ else ProcessId.own()
    return Holder.here(what, process, os.environ.get(LAUNCH_ID_VARIABLE))


def claim_for_ranks(
    run_dir: Path, node_s: float, rank: int, what: str = "torchrun", *, force: bool = False
) -> RunClaim | None:
    """Claim RUN_DIR for torchrun's agent on rank 0; elsewhere wait until the claim is made, and return None.

    A rank that torchrun has not started holds the claim itself. `what`: the command, for messages. `force`: take it
    even if another run holds it.

    A launch has claimed it before it started the ranks, and its agent renews the claim. Raises ConfigError if another
    run holds RUN_DIR, and TimeoutError if this one does not get it.
    """
    mine = holder_for_ranks(what)
    if mine.launch is None and rank == 0:
        return claim(run_dir, mine, node_s, lambda text: sys.stderr.write(f"megarl: {text}\n"), force=force)
    await_claim(run_dir, mine, node_s + GRACE_S)
    return None
