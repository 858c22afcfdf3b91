"""The TCP ports on which the processes of a living run listen, as the kernel lists them."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megarl.cluster.pool.pool_process import read_state
from megarl.common.process.processes import descendants


@dataclass(frozen=True)
class Port:
    """One listening TCP socket. `host`: its address; `::` is IPv6's family, which Ray's gRPC takes for IPv4 too."""

    command: str
    pid: int
    host: str
    number: int


def open_ports(pids: Iterable[int]) -> list[Port]:
    """Return the ports of these processes; none of a process that has ended."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.append(Port(command, pid, each.laddr.ip.removeprefix("::ffff:"), each.laddr.port))  # type: ignore[union-attr]
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    return found


def check_on_loopback(run_dir: Path, *commands: str) -> None:
    """No process of the living run, torchrun included, listens beyond loopback. The run is on this host alone.

    `commands`: parts of command lines of which the run must have listening processes.
    """
    state = read_state(run_dir)
    assert state is not None
    roots = {state["process"]["pid"], state["agent"]["pid"]}
    ports = open_ports(roots.union(*({each.pid for each in descendants(root)} for root in roots)))
    for part in commands:
        assert any(part in port.command for port in ports), f"no {part} among {ports}"
    assert [port for port in ports if port.host not in {"127.0.0.1", "::1"}] == []


if __name__ == "__main__":  # on a host of its own: every port of the host
    sys.stdout.write(json.dumps([asdict(port) for port in open_ports(psutil.pids())]))
