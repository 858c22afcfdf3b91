"""The nodes that a job was given, and the check that they fit the config, before anything starts on them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.cluster.nodes.topology import Topology, stop_seconds
from megarl.common.errors import ConfigError
from megarl.config.derived.hardware import local_gpus
from megarl.config.schema import Config

QUERY_S = 60  # for SLURM's answer to a query


@dataclass(frozen=True)
class Allocation:
    """Holds what the job was given.

    `seconds` are left until the time limit; `signal_s` is how long before it the batch script gets its signal. These
    two and `gpus_per_node` are None if unknown or unlimited.
    """

    hosts: tuple[str, ...]
    gpus_per_node: int | None
    seconds: int | None
    signal_s: int | None = None


def slurm_allocation(environment: Mapping[str, str], signal_s: int | None = None) -> Allocation:
    """Return the allocation of this batch job. Raises ConfigError outside a job, or if SLURM does not answer."""
    if "SLURM_JOB_ID" not in environment or "SLURM_JOB_NODELIST" not in environment:
        raise ConfigError(["not inside a SLURM job: submit the script with sbatch, or use --scheduler local"])
    hosts = _query("scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
    left = _query("squeue", "--noheader", "--job", environment["SLURM_JOB_ID"], "--format", "%L").strip()
    gpus = environment.get("SLURM_GPUS_ON_NODE")
    return Allocation(tuple(hosts), int(gpus) if gpus is not None else None, parse_duration(left), signal_s)


def local_allocation(hosts: tuple[str, ...]) -> Allocation:
    """Return this machine, or a list of `hosts` that have as many GPUs as this machine, as an allocation."""
    return Allocation(hosts, len(local_gpus()), None)


def _query(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise ConfigError([f"{' '.join(command)}: {detail}"]) from None


def parse_duration(text: str) -> int | None:
    """Convert SLURM's `[D-]HH:MM:SS` or `MM:SS` to seconds; None for UNLIMITED, INVALID and NOT_SET."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_allocation(config: Config, topology: Topology, allocation: Allocation, *, cuda: bool) -> None:
    """Raise ConfigError listing everything that does not fit."""
    problems = []
    wanted = len(topology.nodes)
    if len(allocation.hosts) != wanted:
        roles = ", ".join(f"{count} {role}" for role, count in _roles(topology).items())
        problems.append(
            f"nodes: the job has {len(allocation.hosts)} ({', '.join(allocation.hosts)}), the config needs {wanted} "
            f"({roles}); ask for --nodes={wanted}"
        )
    if cuda and allocation.gpus_per_node is not None and allocation.gpus_per_node < topology.node_gpus:
        problems.append(
            f"GPUs per node: the job has {allocation.gpus_per_node}, the config uses devices up to "
            f"{topology.node_gpus - 1}; ask for --gpus-per-node={topology.node_gpus}"
        )
    problems += _time_problems(config, allocation)
    if problems:
        raise ConfigError([f"the allocation does not fit the config: {problem}" for problem in problems])


def _time_problems(config: Config, allocation: Allocation) -> list[str]:
    """Return one message for each way in which the time left is too short."""
    if allocation.seconds is None:
        return []
    problems = []
    stop = stop_seconds(config.launch, config.timeouts)
    if allocation.seconds <= stop:
        problems.append(
            f"time: {allocation.seconds} s are left, but a run is asked to stop {stop} s before the limit "
            "(launch.stop_before_s): it would stop before its first step; ask for a longer --time"
        )
    if allocation.signal_s is not None and allocation.signal_s < stop:
        problems.append(
            f"time: the script gets its signal {allocation.signal_s} s before the limit, but ending a step and saving "
            f"may take {stop} s (launch.stop_before_s): use the script of megarl launch, or submit with "
            f"MEGARL_SIGNAL_S={stop} and --signal=B:USR1@{stop}"
        )
    limit = config.launch.time_limit
    wanted = parse_duration(limit) or 0 if limit is not None else 0
    # Some of the time has passed since the job started: tolerate 300 s, or a tenth of the limit.
    if allocation.seconds < wanted - max(300, wanted // 10):
        problems.append(
            f"time: {allocation.seconds} s are left, launch.time_limit is {limit}; ask for --time={limit} or lower "
            "launch.time_limit"
        )
    return problems


def _roles(topology: Topology) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in topology.nodes:
        role = node.role.removesuffix(" + supervisor")
        counts[role] = counts.get(role, 0) + 1
    return counts
