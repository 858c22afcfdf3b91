"""Processes that a run has left behind."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from megarl.cluster.pool.pool_process import read_state
from megarl.common.process.processes import ProcessId
from tests.support.checkout import environment

# In the environment of what a test starts, and so of all that descends from it: a process of Ray, an engine or a shell
# need not name the run directory by itself.
MARK = "MEGARL_TEST_RUN"


def marked(run_dir: Path | str, **more: str) -> dict[str, str]:
    """The environment of a run's first process, by which `survivors` knows every process of the run."""
    return environment(**{MARK: str(run_dir)}, **more)


def assert_nothing_left(run_dir: Path, within_s: float = 120.0) -> None:
    """No process survives that `survivors` finds."""
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
    """The run's processes: those that name its directory or its private one.

    They do so in the command line, in the environment (which has `MARK` if it is marked), or by an open file: Ray's
    workers write their title over both.
    """
    names = [str(run_dir)]
    if private := (read_state(run_dir) or {}).get("private_directory"):
        names.append(private)
    return [
        process
        for process in psutil.process_iter(["name"])
        if process.pid != os.getpid() and any(name in text for text in _texts(process) for name in names)
    ]


def _texts(process: psutil.Process) -> Iterator[str]:
    try:
        yield from process.cmdline()
        yield from process.environ().values()
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                yield os.readlink(descriptor)
    except (psutil.Error, FileNotFoundError, PermissionError, ProcessLookupError):
        return
