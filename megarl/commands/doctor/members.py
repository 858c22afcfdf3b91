"""The members of `megarl doctor --nodes`: rank, number of processes and meeting point, from torchrun or `srun`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.cluster.nodes.allocation import QUERY_S
from megarl.cluster.nodes.rendezvous_mark import SERVED_BY_VARIABLE
from megarl.cluster.ray_head import LOOPBACK
from megarl.common.errors import ConfigError
from megarl.common.run_secret import RUN_DIR_VARIABLE
from megarl.run.torchrun_start import SAFE_TORCHRUN

FIRST_PORT, PORTS = 20000, 10000  # of a SLURM step, outside Linux's range for clients (32768 and up)


@dataclass(frozen=True)
class Member:
    """One process: its rank of `size`, its index on its node, and where it meets the others.

    `host` and `port` are those at which rank 0 serves the store. With `agents_name` they are those of the store of
    torchrun's agent, where rank 0 tells under that name at which address its own store listens. `one_host`: all
    processes are known to be on this machine. `others`: names of further nodes, as far as they are known.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int
    agents_name: str | None = None
    one_host: bool = False
    others: tuple[str, ...] = ()


def this_member(environment: Mapping[str, str]) -> Member:
    """Return this process's place, from the variables of torchrun or, without these, of `srun`.

    Raises:
        ConfigError: neither has started this process, or a torchrun on several nodes whose store strangers reach.
    """
    if "RANK" in environment and "MASTER_ADDR" in environment:
        return _of_torchrun(environment)
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment:
        return _of_srun(environment)
    raise ConfigError([
        "doctor --nodes: start one process per node (or per GPU): `srun --ntasks-per-node=1 megarl doctor --nodes`, or "
        f"on every node `{_safe_command('N', 'FIRST_NODE', '1')}`"
    ])  # fmt: skip


def _of_torchrun(environment: Mapping[str, str]) -> Member:
    rank, size, local = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    # torchrun alone sets the number of nodes.
    nodes = environment.get("GROUP_WORLD_SIZE")
    if nodes not in {None, "1"} and environment.get(SERVED_BY_VARIABLE) != str(os.getppid()):
        raise ConfigError([
            f"doctor --nodes: this torchrun's store at {host} can be reached by other hosts, and whoever reaches it "
            "can run code as you (SECURITY.md). Start the same on every node by: "
            f"{_safe_command(str(nodes), host, environment.get('LOCAL_WORLD_SIZE', '1'))}"
        ])  # fmt: skip
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # Whoever has set the variables may have a store of its own at MASTER_PORT.
        return Member(rank, size, local, host, port + 1, one_host=nodes == "1")
    start = f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '')}"
    return Member(rank, size, local, host, port, f"doctor/{start}", one_host=nodes == "1")


def _safe_command(nodes: str, host: str, ranks: str) -> str:
    return (
        f"{RUN_DIR_VARIABLE}=SHARED_DIRECTORY {SAFE_TORCHRUN} --nnodes {nodes} --nproc-per-node {ranks} "
        f"--rdzv-endpoint {shlex.quote(host)}:29400 --local-addr THIS_NODE'S_ADDRESS -m megarl doctor --nodes"
    )


def _of_srun(environment: Mapping[str, str]) -> Member:
    rank, size, local = (int(environment[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID"))
    number = 31 * int(environment["SLURM_JOB_ID"]) + int(environment.get("SLURM_STEP_ID", "0"))
    port = FIRST_PORT + number % PORTS
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return Member(rank, size, local, LOOPBACK, port, one_host=True)
    first, *others = _ask("scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]).split()
    return Member(rank, size, local, _address_of(first), port, others=tuple(others))


def _address_of(name: str) -> str:
    """Return the address of a node, as SLURM itself reaches it."""
    match = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "--oneliner", "show", "node", name))
    return match[1] if match else name


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError([f"{' '.join(command)}: {error}"]) from None
