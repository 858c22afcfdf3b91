"""A child process's own side of the protocol that `megarl.common.process.child_process` describes.

It runs code of users, which may fork. A forked child that returns from such code would answer its parent's request a
second time, so it has no connection and ends where the code returns.
"""

import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Sequence

from megarl.common.process.frames import receive_frame, send_frame
from megarl.common.process.processes import die_with_parent

MAX_MESSAGE = (1 << 32) - 1  # bytes of a message of the parent, which is trusted
PROBLEM_CHARACTERS = 4000


class ChildProgram:
    """This process, whose arguments are the descriptor of its connection and the pid of its parent."""

    def __init__(self, in_forked_child: Callable[[], None] = lambda: None) -> None:
        """`in_forked_child`: what else a child of this process has to give up."""
        descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
        die_with_parent(parent_pid)
        os.dup2(2, 1)  # the code's output belongs in the log, not in the output of a command
        os.set_inheritable(descriptor, False)
        self.connection, self._pid = socket.socket(fileno=descriptor), os.getpid()

        def give_up() -> None:
            in_forked_child()
            self.connection.close()  # otherwise the parent would not see that this process has ended

        os.register_at_fork(after_in_child=give_up)

    def receive(self) -> bytes:
        """Return the next message. Raises EOFError or another OSError if the parent has ended."""
        return receive_frame(self.connection, MAX_MESSAGE)

    def send(self, message: bytes) -> None:
        """Answer, unless this is a forked child."""
        self.end_if_forked()
        send_frame(self.connection, message)

    def end_if_forked(self) -> None:
        """End this process if the code forked it and it has returned."""
        if os.getpid() != self._pid:
            os.write(2, b"a child that user code had forked came back from it: it was ended\n")
            os._exit(0)


def prepare(path: Sequence[str], memory_bytes: int | None) -> None:
    """Find the same modules as the parent, whose `sys.path` is given, and allocate at most `memory_bytes`."""
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    sys.path += [entry for entry in path if entry not in sys.path]


def json_bytes(content: object) -> bytes:
    r"""Return the bytes of JSON content, with lone surrogates, which are no Unicode text, replaced."""
    text = json.dumps(content)
    if "\\ud" not in text:
        return text.encode()
    return json.dumps(_replaced(json.loads(text))).encode()


def _replaced(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_replaced(key): _replaced(each) for key, each in value.items()}
    return [_replaced(each) for each in value] if isinstance(value, list) else value
