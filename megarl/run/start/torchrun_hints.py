"""Refuses torchrun's open stores across hosts, and shows how to start the same run without open ports."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.cluster.torchrun import NAME, SERVED_BY_VARIABLE
from megarl.common.clocks import GRACE_S
from megarl.common.process.processes import ProcessId
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE, Holder, RunClaim, await_claim, claim
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE

# The claim of trainer ranks on RUN_DIR: no rank writes there before its run holds it.


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

    A launch claims it before it starts the ranks, and its agent renews the claim. Raises ConfigError if another run
    holds RUN_DIR, and TimeoutError if this run does not get it.
    """
    mine = holder_for_ranks(what)
    if mine.launch is None and rank == 0:
        return claim(run_dir, mine, node_s, lambda text: sys.stderr.write(f"megarl: {text}\n"), force=force)
    await_claim(run_dir, mine, node_s + GRACE_S)
    return None


SAFE_TORCHRUN = f"torchrun --rdzv-backend {NAME}"


def notice_of_open_stores(environment: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    """Return the notice with the safe command, or None if torchrun's stores listen on one address and are signed.

    `environment`: that of a rank; `arguments`: its script and what follows it. None also for a rank that torchrun has
    restarted, because the notice was shown at its first start, and for one that torchrun has not started.
    """
    if not _is_open(environment) or is_restart(environment):
        return None
    return (
        "this torchrun listens on all interfaces of the host, and with its own rendezvous anyone who reaches the "
        f"port can run code as you (SECURITY.md). The same run without that: {SAFE_TORCHRUN} --nproc-per-node "
        f"{_ranks(environment)} {shlex.join(arguments)}"
    )


def refuse_open_stores(environment: Mapping[str, str], arguments: Sequence[str], run_dir: Path) -> None:
    """Raise ValueError, with the safe command, if torchrun's stores are open and ranks of several hosts use them.

    Also for ranks that torchrun (--max-restarts) has restarted, or a refusal would only cost a restart.

    On one host `torchrun --standalone` and a plain `torchrun` are what users type first, so there
    `notice_of_open_stores` is all. The arguments are its own; `run_dir`: that of the run.
    """
    if not _is_open(environment):
        return
    nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
    if nodes == 1:
        return
    host = environment["MASTER_ADDR"]
    command = (
        f"{RUN_DIR_VARIABLE}={shlex.quote(str(run_dir.resolve()))} {SAFE_TORCHRUN} --nnodes {nodes} "
        f"--rdzv-endpoint {host}:29400 --local-addr THIS_NODE'S_ADDRESS --nproc-per-node {_ranks(environment)} "
        f"{shlex.join(arguments)}"
    )
    raise ValueError(
        f"this torchrun's store at {host} can be reached by other hosts, and anyone who reaches it can run code as "
        f"you (SECURITY.md). Start the same run by: {command}"
    )


def _is_open(environment: Mapping[str, str]) -> bool:
    """Return whether a torchrun with another rendezvous started this rank."""
    return "TORCHELASTIC_RUN_ID" in environment and environment.get(SERVED_BY_VARIABLE) != str(os.getppid())


def is_restart(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has restarted the ranks of this run."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _ranks(environment: Mapping[str, str]) -> str:
    return environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE", "1"))
