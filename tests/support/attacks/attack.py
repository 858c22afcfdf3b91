"""The attempts of a stranger: a pickle that runs code, and a look at where a process listens."""

import os
import pickle
import socket
from pathlib import Path

import psutil


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def attack(path: Path) -> bytes:
    """A pickle that makes the directory `path` when it is read."""
    return pickle.dumps(_Attack(path))


def addresses(port: int, pid: int | None = None) -> set[str]:
    """The addresses on which a process (default: this one) listens at `port`."""
    connections = psutil.Process(pid).net_connections("inet")
    return {each.laddr.ip for each in connections if each.status == "LISTEN" and each.laddr.port == port}


def reachable(host: str, port: int) -> bool:
    """Return whether something accepts connections at `host`:`port`."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    return True
