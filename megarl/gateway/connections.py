"""Ends connections whose client does not send the head of a request in time.

aiohttp 3.14 ends idle connections only after their first request, so a client that never completes one could keep a
connection, and with many of them all descriptors, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

HEAD_S = 30.0
AGAIN_S = 1.0


class SlowClients:
    """Watches the connections of one server."""

    def __init__(self, head_s: float = HEAD_S) -> None:
        """`head_s`: the time from the connection to the end of the first request's head."""
        self._head_s = head_s
        self._silent: set[asyncio.BaseProtocol] = set()  # for `head_s` after their connection at most

    def watched(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """Return what makes the protocol of each connection of a server."""

        def connect() -> asyncio.Protocol:
            made = server()
            self._silent.add(made)
            asyncio.get_running_loop().call_later(self._head_s, self._end_if_silent, made)
            return made

        return connect

    def asked(self, request: web.Request) -> None:
        """Note that the client of a request has sent its head."""
        self._silent.discard(request.protocol)

    def _end_if_silent(self, connection: web.RequestHandler, last: bool = False) -> None:
        if connection not in self._silent:
            return
        if not last:  # after a stall of this process the head may be here, and not be read yet
            asyncio.get_running_loop().call_later(AGAIN_S, self._end_if_silent, connection, True)
            return
        self._silent.discard(connection)
        connection.force_close()
