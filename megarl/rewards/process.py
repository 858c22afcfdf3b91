"""The parent's side of one reward process: start, send, receive with a timeout, kill."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence

from megarl.common.process.child_process import AnswerError, ChildProcess, StartError
from megarl.common.process.frames import FrameError, receive_frame, send_frame
from megarl.rewards.types import RewardSpec, Setup
from megarl.rewards.worker_protocol import MAX_ANSWER_BYTES, RewardAnswer, decode_answer


class WorkerDiedError(RuntimeError):
    """The process ended before it answered."""


class WorkerTimeoutError(RuntimeError):
    """No answer in time."""


class ForeignAnswerError(RuntimeError):
    """The process sent what is no answer to the sample that it was given."""


class RewardProcess:
    """A reward process, started by the constructor without waiting until it is ready.

    The kernel kills it when the thread that constructed it ends (PR_SET_PDEATHSIG). `memory_bytes`: the most that it
    may allocate; None: no limit.
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

    def send(self, batch: Sequence[tuple[int, bytes]], timeout_s: float) -> None:
        """Send a batch of numbers and pickled samples; raises WorkerDiedError if the process does not take it in time.

        It waits for samples, so it takes them at once, unless it was stopped or has ended.
        """
        try:
            send_frame(self._connection, pickle.dumps(list(batch)), timeout_s)
        except TimeoutError as error:
            raise WorkerDiedError(f"it did not take its samples within {timeout_s:g} s and was killed") from error
        except OSError as error:
            raise WorkerDiedError(self._child.ending()) from error

    def receive(self, task: int, timeout_s: float) -> RewardAnswer:
        """Return the answer for the sample with the number `task`.

        Raises WorkerTimeoutError after `timeout_s`, WorkerDiedError if the process ends, and ForeignAnswerError if it
        sends anything else.
        """
        try:
            return decode_answer(receive_frame(self._connection, MAX_ANSWER_BYTES, timeout_s), task)
        except TimeoutError as error:
            raise WorkerTimeoutError(f"no reward after {timeout_s:g} s; the process was killed") from error
        except (EOFError, OSError) as error:
            raise WorkerDiedError(f"the process ended: {self._child.ending()}") from error
        except (AnswerError, FrameError) as error:
            raise ForeignAnswerError(f"its process sent {error}; it was killed") from error

    def kill(self) -> None:
        """Kill the process and all that it started, as `ChildProcess.kill`. Any thread may call it, also repeatedly."""
        self._child.kill()

    def close(self) -> None:
        """Kill the process and close the connection. Only the thread that receives from it may call this."""
        self._child.close()
