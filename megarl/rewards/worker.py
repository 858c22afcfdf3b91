"""The program of a reward process (`megarl.common.process.child_program`).

The setup is a pickled `Setup`. The pool then sends pickled lists of (number of the sample, pickled pair of the
function's number and the sample). The worker scores them one at a time and answers each at once and in order, so the
pool always knows which sample it waits for.
"""

import os
import pickle
import traceback
from collections.abc import Sequence

from megarl.common.process.child_program import PROBLEM_CHARACTERS, ChildProgram, json_bytes, prepare
from megarl.common.trust.secret_references import resolved
from megarl.rewards.process import encode_answer
from megarl.rewards.registry import as_result, resolve
from megarl.rewards.types import ErrorReason, RewardFunction, RewardResult, Setup

Batch = list[tuple[int, bytes]]
TRACE_FRAMES = 6
TRACE_CHARACTERS = 2000


def score(functions: Sequence[RewardFunction], payload: bytes) -> RewardResult:
    """Score one pickled (number, sample). Any exception of the function, SystemExit included, is part of the answer."""
    try:
        number, sample = pickle.loads(payload)
        return functions[number](sample)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        code = as_result.__code__
        refused = any((frame.filename, frame.name) == (code.co_filename, code.co_name) for frame in frames)
        reason: ErrorReason = "memory" if isinstance(error, MemoryError) else "invalid" if refused else "exception"
        return RewardResult.failed(reason, _describe(error), _trace(error))


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
    """Return the end of the traceback, without megarl's frames."""
    ours = (__file__, as_result.__code__.co_filename)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    lines = "".join(traceback.format_list(frames[-TRACE_FRAMES:]))
    return f"{lines}{type(error).__name__}: {_text(error)}"[-TRACE_CHARACTERS:]


def serve(program: ChildProgram) -> None:
    """Receive the setup, then score samples until the pool closes the connection."""
    setup: Setup = pickle.loads(program.receive())
    prepare(setup.path, setup.memory_bytes)
    functions, problem = _resolve(setup)
    program.send(json_bytes({"problem": problem[:PROBLEM_CHARACTERS]}))
    if problem:
        return
    while True:
        try:
            batch: Batch = pickle.loads(program.receive())
        except (EOFError, ConnectionResetError):
            return
        for task, payload in batch:
            program.send(encode_answer(task, score(functions, payload)))


def _resolve(setup: Setup) -> tuple[list[RewardFunction], str]:
    """Return the functions, and the problem of the first unusable one, or ""."""
    functions = []
    for spec in setup.functions:
        place = "" if spec.key == "reward" else f"{spec.key}: "  # the messages already name the keys of `reward`
        try:
            functions.append(resolve(spec.function, resolved(spec.kwargs, "reward.kwargs")))
        except ValueError as error:
            return [], f"{place}{error}"
        except BaseException as error:
            more = "; raise reward.memory_gib" if isinstance(error, MemoryError) else ""
            return [], f"{place}reward.function {spec.function!r}: warm-up failed: {_describe(error)}{more}"
    return functions, ""


def main() -> None:
    """Score samples until the connection is closed."""
    serve(ChildProgram())
    os._exit(0)  # threads started by a function could keep the interpreter alive


if __name__ == "__main__":
    main()
