"""A Python program as a child process that talks through a socket and can be killed with everything it started.

All use one protocol: the parent sends a setup, and the child answers with a report, whose `problem` says why it cannot
work. Every message is a frame (`megarl.common.process.frames`), bounded in size and time. The child runs users' code,
so nothing that it sends is unpickled: it is JSON, and checked. Its side is `megarl.common.process.child_program`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from megarl.common.process.frames import FrameError, receive_frame, send_frame
from megarl.common.process.processes import descendants, kill

MAX_REPORT = 1 << 24  # bytes
REAP_S = 10.0

CheckedAnswer = TypeVar("CheckedAnswer")
_REPORT = TypeAdapter(dict[str, Any])


class AnswerError(ValueError):
    """A message of a child is not the expected answer."""


class StartError(RuntimeError):
    """A child ended during its start, or did not send a report."""


def checked_answer(encoded: bytes, kind: TypeAdapter[CheckedAnswer]) -> CheckedAnswer:
    """Return a message of a child. Raises AnswerError if it is not of that kind."""
    try:
        return kind.validate_json(encoded, strict=True)
    except ValidationError as error:
        raise AnswerError(f"a message that is not an answer: {encoded[:60]!r}") from error


class ChildProcess:
    """`python -m MODULE FD PID`, with one end of a socket pair as FD and the pid of this process. It is not waited for.

    The kernel kills it when the thread that made it ends (`die_with_parent`). `what` names it in messages.
    """

    def __init__(self, module: str, what: str = "a child process") -> None:
        self._what = what
        self.connection, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # so that its own child processes are killed with it
            )

    @property
    def pid(self) -> int:
        """The pid of the program."""
        return self._process.pid

    def handshake(self, setup: bytes, timeout_s: float) -> dict[str, Any]:
        """Send the setup, and return the report. It may be called in any thread.

        Raises ValueError with the problem that the report names, TimeoutError after `timeout_s`, and StartError.
        """
        deadline = time.monotonic() + timeout_s
        try:
            send_frame(self.connection, setup, timeout_s)
            encoded = receive_frame(self.connection, MAX_REPORT, max(0.01, deadline - time.monotonic()))
            report = checked_answer(encoded, _REPORT)
        except TimeoutError as error:
            raise TimeoutError(f"{self._what} was not ready after {timeout_s:g} s") from error
        except (EOFError, OSError) as error:
            raise StartError(f"{self._what} ended at its start: {self.ending()}") from error
        except (AnswerError, FrameError) as error:
            raise StartError(f"{self._what} sent {error} at its start") from error
        if problem := report.get("problem"):
            raise ValueError(str(problem))
        return report

    def kill(self) -> None:
        """Send SIGKILL to the process and its descendants, and reap it. Any thread may call it, also repeatedly.

        Children are killed even if the process has already ended, except those that left its session and so have
        another parent.
        """
        if self._process.returncode is not None:
            return
        kill_session(self._process.pid)  # not reaped yet, so no other process can have its number
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=REAP_S)

    def close(self) -> None:
        """Kill the process and close the connection. Only the thread that receives from it may call this."""
        self.kill()
        self.connection.close()

    def ending(self, within_s: float = 2.0) -> str:
        """Describe how the process ended. It is not reaped, so its number stays reserved until `kill`."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self._process.returncode is not None:
                return ending_of(self._process.returncode)
            with contextlib.suppress(ChildProcessError):  # `close` in another thread has reaped it meanwhile
                ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    return ending_of(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
            time.sleep(0.005)
        return "it closed its connection"


def kill_session(pid: int) -> None:
    """Send SIGKILL to a session leader and to all its descendants, also outside the session."""
    apart = descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    kill(apart, signal.SIGKILL)


def ending_of(code: int) -> str:
    """Describe the end of a process by its exit code, which is minus the signal that killed it."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
