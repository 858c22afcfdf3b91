"""The members of `megarl doctor --nodes`: rank, number of processes and meeting point, from torchrun or `srun`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.cluster.nodes.allocation import QUERY_S
from megarl.common.errors import ConfigError

FIRST_PORT, PORTS = 20000, 10000  # of a SLURM step, outside Linux's range for clients (32768 and up)


@dataclass(frozen=True)
class Member:
    """One process: its rank of `size`, its index on its node, and the address at which rank 0 listens."""

    rank: int
    size: int
    local: int
    host: str
    port: int


def this_member(environment: Mapping[str, str]) -> Member:
    """Return this process's place, from the variables of torchrun or, without these, of `srun`.

    Raises:
        ConfigError: neither has started this process.
    """
    if "RANK" in environment and "MASTER_ADDR" in environment:
        rank, size, local = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        # torchrun's own store listens at MASTER_PORT.
        return Member(rank, size, local, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]) + 1)
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment:
        rank, size, local = (int(environment[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID"))
        number = 31 * int(environment["SLURM_JOB_ID"]) + int(environment.get("SLURM_STEP_ID", "0"))
        return Member(rank, size, local, _first_host(environment["SLURM_STEP_NODELIST"]), FIRST_PORT + number % PORTS)
    raise ConfigError([
        "doctor --nodes: start one process per node (or per GPU): `srun --ntasks-per-node=1 megarl doctor --nodes`, or "
        "`torchrun --nnodes N --nproc-per-node 1 ... -m megarl doctor --nodes` on every node"
    ])  # fmt: skip


def _first_host(nodes: str) -> str:
    """Return the address of the first node of a SLURM list such as `n[1-4]`, as SLURM itself reaches it."""
    name = _ask("scontrol", "show", "hostnames", nodes).split()[0]
    match = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "--oneliner", "show", "node", name))
    return match[1] if match else name


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError([f"{' '.join(command)}: {error}"]) from None
