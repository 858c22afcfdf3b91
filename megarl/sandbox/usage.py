"""The memory and files that the processes of a sandbox hold at a moment, read from outside through its init."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megarl.sandbox.bubblewrap import MIB, PROGRAM, SCRATCH

_HELD = ("RssAnon", "RssShmem", "VmSwap")


@dataclass(frozen=True)
class Usage:
    """Bytes of memory of all processes and of the scratch directory; and the entries of that directory."""

    memory: int
    entries: int

    @property
    def memory_mib(self) -> float:
        """The memory in MiB."""
        return self.memory / MIB


def usage(init: int) -> Usage | None:
    """Return what the sandbox holds whose init has the pid `init` on the host; None if it has ended.

    The sandbox has a /proc of its own, so only its processes are counted. Raises PermissionError if it is hidden.
    """
    root = f"/proc/{init}/root"
    try:
        if not os.path.lexists(f"{root}{PROGRAM}"):  # its root is the host's still
            return None
        processes = [name for name in os.listdir(f"{root}/proc") if name.isdigit()]
        scratch = os.statvfs(f"{root}{SCRATCH}")
    except (FileNotFoundError, ProcessLookupError):
        return None
    memory = sum(_held(f"{root}/proc/{name}/status") for name in processes)
    memory += (scratch.f_blocks - scratch.f_bfree) * scratch.f_frsize
    return Usage(memory, scratch.f_files - scratch.f_ffree)


def _held(path: str) -> int:
    """Return the bytes of one process that are not files: in memory or swapped out, shared ones counted in each."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(fields[name].split()[0]) << 10 for name in _HELD if name in fields)
