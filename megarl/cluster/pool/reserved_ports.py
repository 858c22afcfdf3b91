"""Ports that are kept free for processes that will listen on them later."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import TracebackType


class ReservedPorts:
    """TCP ports of this host that the kernel gives to nobody who asks for any free port, until `close`.

    Each has a socket that is bound but does not listen, with SO_REUSEADDR. Linux leaves such a port out when it chooses
    one, and lets a process take it that asks for this port and has set SO_REUSEADDR too, as servers do: Ray's agents
    (2.60.0), torch's TCPStore (2.13.0) and slurm's daemons among them.
    """

    def __init__(self, count: int) -> None:
        """Raise OSError if the host has no `count` free ports."""
        self._held = ExitStack()
        self.ports: list[int] = []
        with ExitStack() as stack:
            for _ in range(count):
                held = stack.enter_context(socket.socket())
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(("", 0))
                self.ports.append(held.getsockname()[1])
            self._held = stack.pop_all()

    def close(self) -> None:
        """Give the ports up. Whoever listens on one keeps it."""
        self._held.close()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
