"""A reward process: `python -m megarl.rewards.worker FD PARENT_PID`, one connection, one sample at a time.

Protocol over the inherited connection: the pool sends a `Setup`, the worker answers `("ready", "")` or
`("failed", why)`. Then lists of pickled samples come, and exactly one `Answer` per sample goes back, in
order, as soon as it is known: so the pool always knows which sample it is waiting for.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from megarl.rewards.resolve import as_result, resolve
from megarl.rewards.types import Answer, ErrorReason, RewardFunction, Setup

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent goes, and go now if it went before we could ask."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def judge(function: RewardFunction, payload: bytes) -> Answer:
    """One sample's answer. Whatever the function raises, SystemExit included, is an answer too."""
    try:
        return function(pickle.loads(payload)), None, ""
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        refused = any(frame.name == as_result.__name__ for frame in frames)
        reason: ErrorReason = "invalid" if refused else "exception"
        return None, reason, _describe(error)


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}{where}"[:500]


def serve(connection: Connection) -> None:
    setup: Setup = connection.recv()
    sys.path += [entry for entry in setup.path if entry not in sys.path]
    try:
        function = resolve(setup.function, setup.kwargs)
    except ValueError as error:
        connection.send(("failed", str(error)))
        return
    except BaseException as error:
        connection.send(("failed", f"reward.function {setup.function!r}: warm-up failed: {_describe(error)}"))
        return
    connection.send(("ready", ""))
    while True:
        try:
            payloads: list[bytes] = connection.recv()
        except EOFError:
            return
        for payload in payloads:
            connection.send(judge(function, payload))


def main() -> None:
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent_pid)
    os.dup2(2, 1)  # what a function prints goes to the log, not into somebody's output
    with Connection(descriptor) as connection:
        serve(connection)
    # A function may have left threads behind that would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
