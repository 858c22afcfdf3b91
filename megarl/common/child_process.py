"""A Python program as a child that talks through a socket and can be killed together with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from megarl.common.processes import descendants, kill

REAP_S = 10.0


class ChildProcess:
    """`python -m MODULE FD PID`, with one end of a socket pair as FD and the pid of this process. It is not waited for.

    The program is expected to call `die_with_parent`, so the kernel kills it when the thread that made it ends.
    """

    def __init__(self, module: str) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # so that processes which it starts are killed with it
            )

    @property
    def pid(self) -> int:
        """The pid of the program."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL to the process and to all that it started, and reap it. Any thread may call it, also repeatedly.

        Its children are killed if it has ended itself, too. Not found are children that have left its session, if it
        has ended before this call: they have another parent then.
        """
        if self._process.returncode is not None:
            return
        apart = descendants(self._process.pid)  # those that have left the session, too
        # The process has not been reaped, so no other one can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill(apart, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=REAP_S)

    def close(self) -> None:
        """Kill the process and close the connection. Only the thread that receives from it may call this."""
        self.kill()
        self.connection.close()

    def ending(self, within_s: float = 2.0) -> str:
        """Describe how the process ended. It is not reaped, so that its number stays its own until `kill`."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self._process.returncode is not None:
                return _ending(self._process.returncode)
            with contextlib.suppress(ChildProcessError):  # `close` in another thread has reaped it meanwhile
                ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    return _ending(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
            time.sleep(0.005)
        return "it closed its connection"


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
