"""One reward process as its owner thread sees it: start, send, receive with a deadline, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from megarl.rewards.types import Answer, Setup


class StartError(RuntimeError):
    """The process died at its start, or was not ready in time."""


class WorkerDiedError(RuntimeError):
    """The process ended while an answer was awaited."""


class WorkerTimeoutError(RuntimeError):
    """No answer in time."""


class RewardProcess:
    """Starts at construction, without waiting. It dies with the thread that constructs it (PDEATHSIG)."""

    def __init__(self, function: str, kwargs: dict[str, Any], start_timeout_s: float) -> None:
        self.function = function
        self._start_timeout_s = start_timeout_s
        self._deadline = time.monotonic() + start_timeout_s
        ours, theirs = socket.socketpair()
        # A stopped process must not block us in the middle of a message.
        bound = struct.pack("ll", int(start_timeout_s) + 1, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megarl.rewards.worker", str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # so that what the function itself starts is killed with it
            )
        self._connection = Connection(ours.detach())
        self._setup = Setup(function, kwargs, [entry or os.getcwd() for entry in sys.path])

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Until the function is imported and warm. ValueError if it cannot be, StartError if too late."""
        try:
            self._connection.send(self._setup)
            if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
                limit = f"{self._start_timeout_s:g} s"
                raise StartError(f"a reward process was not ready to run {self.function!r} after {limit}")
            state, message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise StartError(f"a reward process for {self.function!r} died at its start: {self._end()}") from error
        if state != "ready":
            raise ValueError(message)

    def send(self, payloads: list[bytes]) -> None:
        """A batch of pickled samples. WorkerDiedError if the process is gone."""
        try:
            self._connection.send(payloads)
        except OSError as error:
            raise WorkerDiedError(self._end()) from error

    def receive(self, timeout_s: float) -> Answer:
        """The next answer. WorkerTimeoutError after `timeout_s`, WorkerDiedError if the process ends."""
        try:
            if not self._connection.poll(timeout_s):
                raise WorkerTimeoutError(f"no reward after {timeout_s:g} s; the process was killed")
            answer: Answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(f"the process ended: {self._end()}") from error
        return answer

    def kill(self) -> None:
        """SIGKILL to the process and its session, and reap it. Safe to repeat, from any thread."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10.0)

    def close(self) -> None:
        """Kill, and give the descriptor back; for the owner thread only, which may be reading from it."""
        self.kill()
        self._connection.close()

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=2.0)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "it closed its connection"
