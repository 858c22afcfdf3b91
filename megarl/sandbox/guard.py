"""Ends the sandboxes that a killed process was starting; a separate program, without imports from megarl.

bubblewrap's processes end with their starter, but only once they have asked the kernel for it: one that is just
starting survives the starter's death. The guard reads from a pipe whose writing end only the starter has. When the pipe
closes, it kills every bubblewrap whose command line has the starter's mark, and ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys
import threading
import time

PAUSE_S = 0.05
QUIET = 4  # it ends after this many searches without a result


_STARTING = threading.Lock()


def guard_of(owner: int, python: str) -> str:
    """Return the mark for command lines of this process, `owner`, after starting its guard.

    `python`: the interpreter. A forked process gets its own guard.
    """
    with _STARTING:
        return _start_guard(owner, python)[0]


@functools.cache
def _start_guard(owner: int, python: str) -> tuple[str, subprocess.Popen[bytes]]:
    mark = f"megarl-{owner}-{secrets.token_hex(8)}"
    guard = subprocess.Popen(
        [python, "-I", "-S", os.path.abspath(__file__), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,  # it must survive a kill of this process's group
    )
    return mark, guard


def marked(owner: str) -> list[int]:
    """Return the pids of the bubblewraps that a process has started. `owner`: its mark, or a prefix of it."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            if words[0].endswith(b"bwrap") and any(word.startswith(owner.encode()) for word in words):
                found.append(int(name))
    return found


def main() -> None:
    """Wait for the end of the owner, then kill. Argument: the mark."""
    mark, quiet = sys.argv[1], 0
    while os.read(0, 1):
        pass
    while quiet < QUIET:
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
