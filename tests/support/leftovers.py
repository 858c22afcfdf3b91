"""Processes that a run has left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def assert_nothing_left(run_dir: Path, within_s: float = 30.0) -> None:
    """No process that names the run directory in its command line or environment survives."""
    deadline = time.monotonic() + within_s
    while left := survivors(run_dir):
        assert time.monotonic() < deadline, [(p.pid, p.info["name"]) for p in left]
        time.sleep(0.3)


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
