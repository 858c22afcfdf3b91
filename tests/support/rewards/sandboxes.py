"""Helpers for tests that run programs in a sandbox. They have the mark `sandbox` (tests/conftest.py)."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

from megarl.sandbox.limits import Limits, RunResult
from megarl.sandbox.runner import Sandbox


def run_sandboxed(source: str, limits: Limits | None = None, stdin: str = "", timeout_s: float = 60.0) -> RunResult:
    """Run one program. Its time is long by default, for a loaded machine."""
    with contextlib.closing(Sandbox(limits or Limits(cpu_s=30), slots=1)) as sandbox:
        return sandbox.run_now(source, stdin=stdin, timeout_s=timeout_s)


def sandboxes_of(process: int) -> list[str]:
    """The command lines of what still runs of the sandboxes that a process has started, at any depth."""
    lines = []
    for each in psutil.Process(process).children(recursive=True):
        try:
            line = each.cmdline()
        except psutil.NoSuchProcess:
            continue
        if line and each.status() != psutil.STATUS_ZOMBIE:
            lines.append(" ".join(line)[:200])
    return [line for line in lines if "bwrap" in line or "/sandbox/program.py" in line]


def processes_with(text: str) -> list[int]:
    """The pids of all processes on this host whose arguments or name contain a text, without this process."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                content = (path / "cmdline").read_bytes() + (path / "comm").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if text.encode() in content:
                found.append(int(path.name))
    return found


def outside(program: str, **environment: str) -> str:
    """Run a program without a sandbox, as a user would who does not know better."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    return ended.stdout + ended.stderr
