"""Processes that a run has left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from megarl.common.processes import ProcessId


def assert_nothing_left(run_dir: Path, within_s: float = 30.0) -> None:
    """No process that names the run directory in its command line or environment survives."""
    deadline = time.monotonic() + within_s
    while left := survivors(run_dir):
        assert time.monotonic() < deadline, [(p.pid, p.info["name"]) for p in left]
        time.sleep(0.3)


def sockets_and_temporary_files(processes: Iterable[ProcessId]) -> set[Path]:
    """Files below /tmp or /dev/shm that the processes have open, and the paths of their Unix sockets."""
    found: set[str] = set()
    for each in processes:
        try:
            process = psutil.Process(each.pid)
            found |= {str(socket.laddr) for socket in process.net_connections(kind="unix")}
            found |= {os.readlink(path) for path in Path(f"/proc/{each.pid}/fd").iterdir()}
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    return {Path(path) for path in found if path.startswith(("/tmp/", "/dev/shm/")) and not path.endswith(" (deleted)")}


def of_private_directory(private: Path) -> list[Path]:
    """The directory, and what of its processes is in /dev/shm."""
    tag = private.name.removeprefix("megarl-")
    return [path for path in (private, *Path("/dev/shm").glob(f"*{tag}*")) if path.exists()]


def open_to_others(directory: Path) -> list[Path]:
    """Paths below a directory that other users may change, links left out."""
    return [path for path in directory.rglob("*") if not path.is_symlink() and path.lstat().st_mode & 0o022]


def survivors(run_dir: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.pid == os.getpid() or process.info["name"] is None:
            continue
        try:
            text = " ".join(process.info["cmdline"] or []) + " ".join(process.environ().values())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if str(run_dir) in text:
            found.append(process)
    return found
