"""The parent's side of one reward process: start, send, receive with a timeout, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megarl.rewards.types import RewardSpec, Setup, WorkerMessage


class StartError(RuntimeError):
    """The process ended during its start, or was not ready in time."""


class WorkerDiedError(RuntimeError):
    """The process ended before it answered."""


class WorkerTimeoutError(RuntimeError):
    """No answer in time."""


class RewardProcess:
    """A reward process, started by the constructor without waiting until it is ready.

    The kernel kills it when the thread that constructed it ends (PR_SET_PDEATHSIG).
    """

    def __init__(self, functions: Sequence[RewardSpec], start_timeout_s: float) -> None:
        self.name = ", ".join(repr(each.function) for each in functions)
        self._start_timeout_s = start_timeout_s
        self._deadline = time.monotonic() + start_timeout_s
        ours, theirs = socket.socketpair()
        # With these timeouts a suspended process cannot block the parent in the middle of a message.
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
                start_new_session=True,  # so that processes which the function starts are killed with it
            )
        self._connection = Connection(ours.detach())
        self._setup = Setup(tuple(functions), [entry or os.getcwd() for entry in sys.path])

    def wait_ready(self) -> None:
        """Wait until the functions are imported and warmed up.

        Raises ValueError if one cannot be used, and StartError if the process ends or is not ready in time.
        """
        try:
            self._connection.send(self._setup)
            if not self._connection.poll(max(0.0, self._deadline - time.monotonic())):
                limit = f"{self._start_timeout_s:g} s"
                raise StartError(
                    f"a reward process was not ready to run {self.name} after {limit}; raise timeouts.engine_start_s"
                )
            state, message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise StartError(f"a reward process for {self.name} ended at its start: {self._end()}") from error
        if state != "ready":
            raise ValueError(message)

    def send(self, payloads: list[bytes]) -> None:
        """Send a batch of pickled samples; raises WorkerDiedError if the process has ended."""
        try:
            self._connection.send(payloads)
        except OSError as error:
            raise WorkerDiedError(self._end()) from error

    def receive(self, timeout_s: float) -> WorkerMessage:
        """Return the next answer; raises WorkerTimeoutError after `timeout_s`, WorkerDiedError if the process ends."""
        try:
            if not self._connection.poll(timeout_s):
                raise WorkerTimeoutError(f"no reward after {timeout_s:g} s; the process was killed")
            answer: WorkerMessage = self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(f"the process ended: {self._end()}") from error
        return answer

    def kill(self) -> None:
        """Send SIGKILL to the process and its session, and reap it. Any thread may call it, also repeatedly."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10.0)

    def close(self) -> None:
        """Kill the process and close the connection. Only the thread that receives from it may call this."""
        self.kill()
        self._connection.close()

    def _end(self) -> str:
        """Describe how the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=2.0)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "it closed its connection"
