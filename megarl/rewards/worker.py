"""The program of a reward process: `python -m megarl.rewards.worker FD PARENT_PID`.

Protocol over the inherited socket FD: the pool sends a pickled `Setup`, the worker answers with a `StartReport`. The
pool then sends pickled lists of (number of the sample, pickled pair of the function's number and the sample). The
worker scores them one at a time and sends one `RewardAnswer` per sample, in order and without delay, so the pool always
knows the sample that it waits for.

A reward function may fork. A child that returns from the function would serve the samples of its parent a second time,
so the child has no socket, and ends where the function returns.
"""

from __future__ import annotations

import os
import pickle
import resource
import socket
import sys
import traceback
from collections.abc import Sequence

from megarl.common.frames import receive_frame, send_frame
from megarl.common.processes import die_with_parent
from megarl.common.secret_references import resolved
from megarl.rewards.answers import RewardAnswer, StartReport, encode_answer, encode_start
from megarl.rewards.resolve import as_result, resolve
from megarl.rewards.types import ErrorReason, RewardFunction, Setup

Batch = list[tuple[int, bytes]]
MAX_BATCH_BYTES = (1 << 32) - 1
TRACE_FRAMES = 6
TRACE_CHARACTERS = 2000
PROBLEM_CHARACTERS = 4000


def score(functions: Sequence[RewardFunction], task: int, payload: bytes) -> RewardAnswer:
    """Score one pickled (number, sample). Any exception of the function, SystemExit included, is part of the answer."""
    try:
        number, sample = pickle.loads(payload)
        return RewardAnswer(task, functions[number](sample))
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        code = as_result.__code__
        refused = any((frame.filename, frame.name) == (code.co_filename, code.co_name) for frame in frames)
        reason: ErrorReason = "memory" if isinstance(error, MemoryError) else "invalid" if refused else "exception"
        return RewardAnswer(task, None, reason, _describe(error), _trace(error))


def _describe(error: BaseException) -> str:
    """Return type, message and innermost line of an exception, in at most 500 characters."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(_text(error).split())}{where}"[:500]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:400]
    except BaseException:
        return "its message cannot be read"


def _trace(error: BaseException) -> str:
    """Return the end of the traceback: the lines of the function, without those of megarl that called it."""
    ours = (__file__, as_result.__code__.co_filename)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    lines = "".join(traceback.format_list(frames[-TRACE_FRAMES:]))
    return f"{lines}{type(error).__name__}: {_text(error)}"[-TRACE_CHARACTERS:]


def serve(connection: socket.socket) -> None:
    """Receive the setup, then score samples until the pool closes the connection."""
    own_pid = os.getpid()
    setup: Setup = pickle.loads(receive_frame(connection, MAX_BATCH_BYTES))
    if setup.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    functions, problem = _resolve(setup)
    _end_if_forked(own_pid)  # a module that is imported may fork, too
    send_frame(connection, encode_start(StartReport(problem[:PROBLEM_CHARACTERS])))
    if problem:
        return
    while True:
        try:
            batch: Batch = pickle.loads(receive_frame(connection, MAX_BATCH_BYTES))
        except (EOFError, ConnectionResetError):
            return
        for task, payload in batch:
            answer = score(functions, task, payload)
            _end_if_forked(own_pid)
            send_frame(connection, encode_answer(answer))


def _resolve(setup: Setup) -> tuple[list[RewardFunction], str]:
    """Return the functions; and what is wrong with the first one that cannot be used, else an empty text."""
    sys.path += [entry for entry in setup.path if entry not in sys.path]
    functions = []
    for spec in setup.functions:
        place = "" if spec.key == "reward" else f"{spec.key}: "  # the messages themselves name the keys of `reward`
        try:
            functions.append(resolve(spec.function, resolved(spec.kwargs, "reward.kwargs")))
        except ValueError as error:
            return [], f"{place}{error}"
        except BaseException as error:
            more = "; raise reward.memory_gib" if isinstance(error, MemoryError) else ""
            return [], f"{place}reward.function {spec.function!r}: warm-up failed: {_describe(error)}{more}"
    return functions, ""


def _end_if_forked(own_pid: int) -> None:
    """End this process if it is a child of the worker that has come back from a reward function."""
    if os.getpid() != own_pid:
        os.write(2, b"a child that a reward function had forked came back from the function: it was ended\n")
        os._exit(0)


def main() -> None:
    """Score what comes through the inherited socket until it is closed. Arguments: its descriptor, the parent's pid."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    os.dup2(2, 1)  # output that a function prints belongs into the log, not into the output of a command
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        # No child has the socket: it could write into it, and the pool would not see that this process has ended.
        os.register_at_fork(after_in_child=connection.close)
        serve(connection)
    # Threads that a function started could prevent the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
