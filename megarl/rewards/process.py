"""The parent's side of a reward process, and the form of its answers.

Answers are JSON that the parent validates: it decodes nothing that could run code.
"""

import math
import os
import pickle
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict

from pydantic import TypeAdapter

from megarl.common.process.child_process import AnswerError, ChildProcess, StartError, checked_answer
from megarl.common.process.child_program import json_bytes
from megarl.common.process.frames import FrameError, receive_frame, send_frame
from megarl.rewards.types import ErrorReason, OnError, RewardResult, RewardSpec, Setup

MAX_ANSWER_BYTES = 1 << 16  # of an encoded answer; a real one has a few hundred


_ANSWER: TypeAdapter[tuple[int, RewardResult]] = TypeAdapter(tuple[int, RewardResult])


def encode_answer(task: int, result: RewardResult) -> bytes:
    """Return the bytes of the answer for the sample with the number `task`; a too long one becomes an error."""
    encoded = json_bytes([task, asdict(result)])
    if len(encoded) <= MAX_ANSWER_BYTES:
        return encoded
    error = f"the result has {len(encoded)} bytes as JSON, and at most {MAX_ANSWER_BYTES} are allowed: return less"
    return json_bytes([task, asdict(RewardResult.failed("invalid", error))])


def decode_answer(encoded: bytes, task: int) -> RewardResult:
    """Return the answer for the sample `task`. Raises AnswerError for anything else."""
    number, result = checked_answer(encoded, _ANSWER)
    if number != task:
        raise AnswerError(f"an answer for sample {number} where that for sample {task} was due")
    if (result.error is None) != (result.reason is None):
        raise AnswerError("an answer with an error and no reason, or the reverse")
    for score in (result.score, *result.turn_rewards):
        if not math.isfinite(score):
            raise AnswerError(f"an answer with the score {score}, which is no finite number")
    return result


class RewardProcess:
    """A reward process. The constructor starts it without waiting until it is ready.

    The kernel kills it when the constructing thread ends (PR_SET_PDEATHSIG). `memory_bytes`: how much it may allocate;
    None: no limit.
    """

    def __init__(
        self, functions: Sequence[RewardSpec], start_timeout_s: float, memory_bytes: int | None = None
    ) -> None:
        names = ", ".join(repr(each.function) for each in functions)
        self._start_timeout_s = start_timeout_s
        self._child = ChildProcess("megarl.rewards.worker", f"a reward process for {names}")
        self._connection = self._child.connection
        self._setup = Setup(tuple(functions), [entry or os.getcwd() for entry in sys.path], memory_bytes)

    def wait_ready(self) -> None:
        """Wait until the functions are imported and warmed up.

        Raises ValueError if one cannot be used, and StartError if the process ends or is not ready in time.
        """
        try:
            self._child.handshake(pickle.dumps(self._setup), self._start_timeout_s)
        except TimeoutError as error:
            raise StartError(f"{error}; raise timeouts.engine_start_s") from error

    def send(self, batch: Sequence[tuple[int, bytes]], timeout_s: float) -> str:
        """Send a batch of numbers and pickled samples; return why the process does not take it, or "".

        It waits for samples, so it takes them at once unless it was stopped or has ended.
        """
        try:
            send_frame(self._connection, pickle.dumps(list(batch)), timeout_s)
        except TimeoutError:
            return f"it did not take its samples within {timeout_s:g} s and was killed"
        except OSError:
            return self._child.ending()
        return ""

    def receive(self, task: int, timeout_s: float) -> RewardResult:
        """Return the answer for the sample with the number `task`, or why the process has given none.

        The reason is `timeout` after `timeout_s`, `crash` if the process ended, and `foreign` if it sent anything else.
        """
        reason: ErrorReason
        try:
            return decode_answer(receive_frame(self._connection, MAX_ANSWER_BYTES, timeout_s), task)
        except TimeoutError:
            reason, message = "timeout", f"no reward after {timeout_s:g} s; the process was killed"
        except (EOFError, OSError):
            reason, message = "crash", f"the process ended: {self._child.ending()}"
        except (AnswerError, FrameError) as error:
            reason, message = "foreign", f"its process sent {error}; it was killed"
        return RewardResult.failed(reason, message)

    def kill(self) -> None:
        """Kill the process and everything it started, as `ChildProcess.kill`. Idempotent, for any thread."""
        self._child.kill()

    def close(self) -> None:
        """Kill the process and close the connection. Only for the thread that receives from it."""
        self._child.close()


# The failures of a reward function: when they end the run, and which of them are reported.

WINDOW = 64  # latest samples of a function; of fewer, all
MIN_ERRORS = 16  # fewest failures among them that end the run


class Failures:
    """Counts the failures of one reward function, and decides when they end the run and which are reported. Pure.

    They are too many when at least MIN_ERRORS of the latest WINDOW samples have failed, and a larger share of them than
    `max_share`.
    """

    def __init__(self, function: str, on_error: OnError, max_share: float) -> None:
        self._function, self._max_share = function, max_share
        dropped = on_error == "drop"
        self._what = "such samples are not trained on" if dropped else f"such samples get the reward {on_error:g}"
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self.by_reason: Counter[ErrorReason] = Counter()

    def note(self, reason: ErrorReason | None) -> bool:
        """Record a sample, failed if there is a `reason`; return whether there are too many failures."""
        self._failed.append(reason is not None)
        if reason is None:
            return False
        self.by_reason[reason] += 1
        recent = sum(self._failed)
        return recent >= MIN_ERRORS and recent > self._max_share * len(self._failed)

    @property
    def recent(self) -> str:
        """The failures among the latest samples, as text."""
        return f"{sum(self._failed)} of the latest {len(self._failed)} samples"

    def message(self, answer: RewardResult) -> tuple[str, bool]:
        """Return what to say of the failure noted last, "" if nothing, and whether people should see it at once.

        They see the first failure of each reason, with the end of the function's traceback, and the 10th, 100th, 1000th
        ... failure of the function. Of the others, the log has the 2nd, 4th, 8th ... of each reason.
        """
        assert answer.reason is not None  # of an answer without a reward
        count, total = self.by_reason[answer.reason], self.by_reason.total()
        name, text = f"reward function {self._function}", f"{answer.reason} no. {count}: {answer.error}"
        if count == 1:
            trace = f"\n{answer.trace}" if answer.trace else ""
            return f"{name}: {text}; {self._what}{trace}", True
        if str(total).strip("0") == "1":
            return f"{name} has failed for {total} samples; the latest: {text}", True
        return (f"{name}: {text}" if count & (count - 1) == 0 else ""), False
