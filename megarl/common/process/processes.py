"""Process identity and clean-up: no process that a run started may outlive the run.

A process is identified by (pid, start time), because the kernel reuses pids. Three mechanisms end the processes of a
run; most failures are covered by each of them:

- `die_with_parent` (PR_SET_PDEATHSIG) kills a child when the *thread* that forked it ends, so it may be used only
  where that thread lives as long as its process;
- `die_with` ends a process when any other process on the same host ends, by a thread that watches it;
- `sweep` kills the processes that remain.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessId:
    """Identifies a process even after its pid was reused; `start_time` is in clock ticks since boot."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of the process that has `pid`; raises ProcessLookupError if there is none."""
        state = _stat(pid)
        if state is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, state[1])

    @classmethod
    def own(cls) -> ProcessId:
        """Return the identity of this process."""
        return cls.of(os.getpid())


def _stat(pid: int) -> tuple[str, int] | None:
    """Return (state letter, start time) from /proc/PID/stat; None if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command may contain spaces and parentheses: fields start after the last ')'.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[19])


def is_alive(process: ProcessId) -> bool:
    """Return whether the process still runs; a zombie does not."""
    state = _stat(process.pid)
    return state is not None and state[1] == process.start_time and state[0] not in "ZX"


def state_of(process: ProcessId) -> str | None:
    """Return the state letter of a process's main thread as in proc(5); None if the process has ended.

    R: it runs; D: it waits for a disk; T: it is stopped.
    """
    state = _stat(process.pid)
    return state[0] if state is not None and state[1] == process.start_time else None


def this_place() -> str:
    """Name host, boot and pid namespace of this process: two processes of one place see each other's pids.

    Some sandboxes have no boot id or no namespaces; these parts are then empty.
    """
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    return f"{platform.node()}/{boot}/{namespace}"


def has_ended(process: ProcessId, place: str) -> bool | None:
    """Return whether a process of a place (`this_place`) has ended; None if this cannot be seen from here.

    Hosts and containers may share a directory: the pids of another place mean nothing here.
    """
    here = this_place()
    if place == here:
        return not is_alive(process)
    host, _, rest = place.partition("/")
    own_host, _, own_rest = here.partition("/")
    return True if host == own_host and rest.partition("/")[0] != own_rest.partition("/")[0] else None


def still_alive(processes: Iterable[ProcessId]) -> set[ProcessId]:
    """Return those that still run. A long-lived record of processes must drop the others, or it only grows."""
    return {process for process in processes if is_alive(process)}


def die_with_parent(expected_parent: int | None = None) -> None:
    """Let the kernel send this process SIGKILL when the thread that forked it ends. Idempotent.

    `expected_parent` is the parent's pid; the default is the parent that multiprocessing recorded, if any. If that
    process has already ended, this one exits at once with status 1. Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if expected_parent is None:
        parent = multiprocessing.parent_process()
        expected_parent = parent.pid if parent is not None else None
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


def die_with(process: ProcessId, name: str, interval_s: float = 1.0) -> threading.Thread:
    """Start a daemon thread that ends this process and its descendants when `process` ends; return the thread.

    `process` is on the same host but need not be the parent; it is checked every `interval_s` seconds.
    """

    def watch() -> None:
        while is_alive(process):
            time.sleep(interval_s)
        logger.error("%s (pid %d) has ended: this process exits", name, process.pid)
        for handler in logging.getLogger().handlers:
            handler.flush()
        kill(descendants(os.getpid()), signal.SIGKILL)
        os._exit(1)

    thread = threading.Thread(target=watch, name=f"watch-{name}", daemon=True)
    thread.start()
    return thread


def descendants(pid: int) -> set[ProcessId]:
    """Return all live descendants of `pid`, without `pid` itself.

    A process whose parent has ended is not found: callers that need it must record it before.
    """
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    states = {child.pid: _stat(child.pid) for child in children}
    return {ProcessId(each, state[1]) for each, state in states.items() if state is not None and state[0] not in "ZX"}


def own_children() -> set[ProcessId]:
    """Return the processes that `multiprocessing` has started for this one, with their descendants."""
    found: set[ProcessId] = set()
    for each in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError):
            found |= {ProcessId.of(each.pid or 0), *descendants(each.pid or 0)}
    return found


def kill(processes: Iterable[ProcessId], signal_number: int) -> None:
    """Send the signal to each process that still runs; a later process with the same pid gets none."""
    for process in processes:
        if is_alive(process):
            try:
                os.kill(process.pid, signal_number)
            except ProcessLookupError:
                continue


def sweep(processes: Iterable[ProcessId], grace_s: float, timeout_s: float = 5.0) -> set[ProcessId]:
    """Send SIGTERM, then SIGKILL to those alive after `grace_s` seconds; return those alive `timeout_s` later."""
    remaining = set(processes)
    kill(remaining, signal.SIGTERM)
    remaining = _wait_gone(remaining, grace_s)
    kill(remaining, signal.SIGKILL)
    return _wait_gone(remaining, timeout_s)


def _wait_gone(processes: set[ProcessId], timeout_s: float) -> set[ProcessId]:
    """Wait up to `timeout_s` until all have ended; return those that have not."""
    deadline = time.monotonic() + timeout_s
    while True:
        processes = still_alive(processes)
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.05)
