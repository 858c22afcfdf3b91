"""Process identity and clean-up: nothing that a run started may outlive it.

A process is named by (pid, start time): a pid alone may have been reused. Three nets, each enough for most ends:
PR_SET_PDEATHSIG ties a child to the *thread* that forked it (so arm it only where that thread lives as long as its
process), a watch thread ties a process to any other one on its host, and `sweep` kills what is left.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be confused with a later one of the same pid. `start_time` in clock ticks since boot."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """ProcessLookupError if there is no such process."""
        state = _stat(pid)
        if state is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, state[1])

    @classmethod
    def own(cls) -> ProcessId:
        return cls.of(os.getpid())


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time) from /proc, None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command may contain spaces and parentheses: fields start after the last ')'.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[19])


def is_alive(process: ProcessId) -> bool:
    """False also for a zombie: it runs nothing any more."""
    state = _stat(process.pid)
    return state is not None and state[1] == process.start_time and state[0] not in "ZX"


def die_with_parent(expected_parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the thread that forked this process ends. Idempotent.

    `expected_parent`: its pid, default what multiprocessing knows; if it is already gone, exit at once.
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
    """Watch `process` (on this host, not necessarily the parent) from a daemon thread; exit when it is gone."""

    def watch() -> None:
        while is_alive(process):
            time.sleep(interval_s)
        logger.error("%s (pid %d) is gone: exiting", name, process.pid)
        for handler in logging.getLogger().handlers:
            handler.flush()
        kill(descendants(os.getpid()), signal.SIGKILL)
        os._exit(1)

    thread = threading.Thread(target=watch, name=f"watch-{name}", daemon=True)
    thread.start()
    return thread


def descendants(pid: int) -> set[ProcessId]:
    """All living descendants of `pid`, itself not included. Orphans have left the tree: record them in time."""
    children: dict[int, list[int]] = {}
    for candidate in psutil.pids():
        try:
            with open(f"/proc/{candidate}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(candidate)
    found: set[ProcessId] = set()
    queue = list(children.get(pid, ()))
    while queue:
        current = queue.pop()
        queue.extend(children.get(current, ()))
        state = _stat(current)
        if state is not None and state[0] not in "ZX":
            found.add(ProcessId(current, state[1]))
    return found


def kill(processes: Iterable[ProcessId], signal_number: int) -> None:
    """Signal every one that is still the process it was."""
    for process in processes:
        if is_alive(process):
            try:
                os.kill(process.pid, signal_number)
            except ProcessLookupError:
                continue


def sweep(processes: Iterable[ProcessId], grace_s: float, timeout_s: float = 5.0) -> set[ProcessId]:
    """SIGTERM, up to `grace_s` later SIGKILL; returns what is still alive `timeout_s` after that."""
    remaining = set(processes)
    kill(remaining, signal.SIGTERM)
    remaining = _wait_gone(remaining, grace_s)
    kill(remaining, signal.SIGKILL)
    return _wait_gone(remaining, timeout_s)


def _wait_gone(processes: set[ProcessId], timeout_s: float) -> set[ProcessId]:
    deadline = time.monotonic() + timeout_s
    while True:
        processes = {process for process in processes if is_alive(process)}
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.05)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.05) -> None:
    """Poll `condition`; TimeoutError saying `what` was waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(interval_s)
