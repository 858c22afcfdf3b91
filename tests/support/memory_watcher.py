"""Watches the private memory of other processes, in phases that they announce by files."""

from __future__ import annotations

import json
import threading
from pathlib import Path


class MemoryWatcher:
    """A thread that samples the private bytes of each process in the phases that the ranks announce by files.

    The phase `idle NAME` comes before the phase `memory NAME`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._idle: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def peaks(self) -> dict[str, int]:
        """Return the bytes above the phase `idle`, by process and name of the phase."""
        return {name: self._peak[name] - self._idle[name] for name in self._peak}

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            phase = self._directory / "phase"
            pids = self._directory / "pids.json"
            if not phase.exists() or not pids.exists():
                continue
            for process, pid in json.loads(pids.read_text()).items():
                kind, _, name = phase.read_text().partition(" ")
                if process != "engine" and name == "in place":
                    continue  # the trainer does the same either way
                name = f"{process}, {name}" if process == "engine" else process
                if kind == "idle":
                    self._idle[name] = private_bytes(pid)
                elif kind == "memory":
                    self._peak[name] = max(self._peak.get(name, 0), private_bytes(pid))


def private_bytes(pid: int) -> int:
    """Return Private_Clean + Private_Dirty of a process in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    lines = [line.split() for line in text.splitlines() if line.startswith(("Private_Clean:", "Private_Dirty:"))]
    return sum(int(fields[1]) for fields in lines) * 1024
