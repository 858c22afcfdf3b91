"""The program of a reward process: `python -m megarl.rewards.worker FD PARENT_PID`.

Protocol over the inherited connection FD: the pool sends a `Setup`, the worker answers `("ready", "")` or `("failed",
reason)`. The pool then sends lists of pickled pairs (number of the function, sample). The worker scores them one at a
time and sends one `WorkerMessage` per sample, in order and without delay, so the pool always knows the sample that it
waits for.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megarl.common.processes import die_with_parent
from megarl.common.secret_references import resolved
from megarl.rewards.resolve import as_result, resolve
from megarl.rewards.types import ErrorReason, RewardFunction, Setup, WorkerMessage


def score(functions: Sequence[RewardFunction], payload: bytes) -> WorkerMessage:
    """Score one pickled (number, sample). Any exception of the function, SystemExit included, is part of the answer."""
    try:
        number, sample = pickle.loads(payload)
        return functions[number](sample), None, ""
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        refused = any(frame.name == as_result.__name__ for frame in frames)
        reason: ErrorReason = "invalid" if refused else "exception"
        return None, reason, _describe(error)


def _describe(error: BaseException) -> str:
    """Return type, message and innermost line of an exception, in at most 500 characters."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}{where}"[:500]


def serve(connection: Connection) -> None:
    """Receive the setup, then score samples until the pool closes the connection."""
    setup: Setup = connection.recv()
    sys.path += [entry for entry in setup.path if entry not in sys.path]
    functions = []
    for spec in setup.functions:
        place = "" if spec.key == "reward" else f"{spec.key}: "  # the messages themselves name the keys of `reward`
        try:
            functions.append(resolve(spec.function, resolved(spec.kwargs, "reward.kwargs")))
        except ValueError as error:
            connection.send(("failed", f"{place}{error}"))
            return
        except BaseException as error:
            message = f"{place}reward.function {spec.function!r}: warm-up failed: {_describe(error)}"
            connection.send(("failed", message))
            return
    connection.send(("ready", ""))
    while True:
        try:
            payloads: list[bytes] = connection.recv()
        except EOFError:
            return
        for payload in payloads:
            connection.send(score(functions, payload))


def main() -> None:
    """Score what comes through the inherited socket until it is closed. Arguments: its descriptor, the parent's pid."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    os.dup2(2, 1)  # output that a function prints belongs into the log, not into the output of a command
    with Connection(descriptor) as connection:
        serve(connection)
    # Threads that a function started could prevent the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
