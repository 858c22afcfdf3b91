"""Findings about this machine: limits, shared memory, memory, disk and network interfaces."""

import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from megarl.cli.doctor.report import Finding
from megarl.cluster.pool.network import interface_of, own_address
from megarl.common.values import GIB
from megarl.sandbox.availability import sandbox_problem

MIN_OPEN_FILES = 4096
MIN_SHM = 1 * GIB
MIN_MEMORY = 6 * GIB
INFINIBAND = Path("/sys/class/infiniband")


def machine_findings(sandbox_users: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the limits and free space of this machine, and whether it can sandbox programs.

    `sandbox_users`: the parts of a config that need the sandbox; empty if none does, or without a config.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(soft, hard) < MIN_OPEN_FILES
    fix = f"ulimit -n {MIN_OPEN_FILES} or more: Ray and NCCL open many sockets"
    yield Finding.warn_if(few, "open files", f"soft {soft}, hard {hard}", fix)
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    fix = "Ray's object store and vLLM use it; in Docker: --shm-size=8g"
    yield Finding.warn_if(free < MIN_SHM, "/dev/shm", f"{free / GIB:.1f} GiB free", fix)
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    fix = f"the CPU quickstart needs about {MIN_MEMORY // GIB} GiB"
    yield Finding.warn_if(memory.available < MIN_MEMORY, "memory", detail, fix)
    disk = shutil.disk_usage(Path.cwd()).free
    detail, fix = f"{disk / GIB:.1f} GiB free in the current directory", "runs/ holds logs, batches and exports"
    yield Finding.warn_if(disk < 2 * GIB, "disk", detail, fix)
    yield _sandbox_finding(sandbox_users)


def _sandbox_finding(users: Sequence[str]) -> Finding:
    problem = sandbox_problem()
    if problem is None:
        return Finding("ok", "sandbox", "runs programs of a model in a bubblewrap sandbox")
    if users:
        return Finding("fail", "sandbox", problem, f"the config needs it: {', '.join(users)}")
    fix = "only the Python tool and reward.function code need it, and refuse to start without it; add --config FILE"
    return Finding("warn", "sandbox", problem, fix)


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that is up, without loopback."""
    stats, found = psutil.net_if_stats(), {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127.") and stats[name].isup:
                found[name] = str(each.address)
    return found


def rdma_ports(root: Path = INFINIBAND) -> dict[str, str]:
    """Return the state of each InfiniBand or RoCE port, for example `{"mlx5_0:1": "ACTIVE"}`."""
    states = {}
    for file in sorted(root.glob("*/ports/*/state")):
        states[f"{file.parts[-4]}:{file.parts[-2]}"] = file.read_text().partition(":")[2].strip()
    return states


def network_findings(cuda: bool, root: Path = INFINIBAND) -> Iterator[Finding]:
    """Yield the interfaces, the one that a run on several nodes would use, and the RDMA ports."""
    found, stats = interfaces(), psutil.net_if_stats()
    if not found:
        yield Finding("warn", "interfaces", "only loopback: this machine cannot be one of several nodes")
    else:
        speeds = {name: f", {stats[name].speed / 1000:g} Gbit/s" if stats[name].speed else "" for name in found}
        yield Finding("ok", "interfaces", "; ".join(f"{name} {found[name]}{speeds[name]}" for name in found))
        address = own_address(())
        route = interface_of(address)
        yield Finding("ok", "route to other nodes", f"{address} on {route}; launch.interface names another one")
    ports = rdma_ports(root)
    if not ports:
        if cuda:
            yield Finding("ok", "RDMA", "no InfiniBand or RoCE port: NCCL uses TCP between nodes")
        return
    down = [name for name, state in ports.items() if state != "ACTIVE"]
    listed = ", ".join(f"{name} {state}" for name, state in ports.items())
    fix = f"NCCL skips {', '.join(down)}: ask the administrator, or name the others in NCCL_IB_HCA"
    yield Finding.warn_if(bool(down), "RDMA", listed, fix)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited; in Docker: --ulimit memlock=-1; under SLURM: PropagateResourceLimitsExcept=MEMLOCK"
        yield Finding("warn", "locked memory", f"limited to {locked >> 10} KiB: RDMA cannot register buffers", fix)
