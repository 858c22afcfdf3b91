"""A small HTTP server for scrapes: one page, a bearer token in each request, and bounds on what a client may hold.

It runs in threads of the process that has the metrics. A client that is slow or silent holds a thread for `REQUEST_S`
at most, and there are never more than `MOST_CLIENTS` of them.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

PATH = "/metrics"
MOST_CLIENTS = 16
REQUEST_S = 10.0  # for a whole request
_LOOK_S = 0.5  # between two looks for clients that are too slow

Page = Callable[[str], tuple[str, bytes]]


class ScrapeServer(ThreadingHTTPServer):
    """Serves `PATH` on one address until `stop`. HTTP/1.0: a connection carries one request."""

    daemon_threads = True

    def __init__(self, host: str, port: int, token: str, page: Page) -> None:
        """`page`: returns content type and content for the request's header Accept; it is called in any thread.

        Raises:
            ValueError: `host` means all addresses.
            OSError: `host` is no address of this machine, or the port is taken.
        """
        self.address_family, address = one_address(host)
        self.token, self.page = token.encode(), page
        self._since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((address, port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": _LOOK_S}, name="scrape-server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the page."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if self.address_family == socket.AF_INET6 else host!s}:{port}{PATH}"

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name that `HTTPServer` makes, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def stop(self) -> None:
        """Close the port. Waits for the look that is under way, and for no client."""
        self.shutdown()
        self.server_close()
        with self._lock:
            for client in self._since:
                _end(client)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # as in the library
        """Answer in a thread, unless too many clients are there."""
        with self._lock:
            full = len(self._since) >= MOST_CLIENTS
            if not full:
                self._since[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401  # as in the library
        """Forget a client, and close its connection."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections of clients that have been there for too long."""
        late = time.monotonic() - REQUEST_S
        with self._lock:
            for client, since in self._since.items():
                if since < late:
                    _end(client)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # as in the library
        """Log what went wrong with a client; the run does not care."""
        logger.info("scrape of %s failed", client_address, exc_info=True)


def one_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return family and address of a host. Raises ValueError if that means all addresses, OSError if it is none."""
    family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
        raise ValueError(f"{host!r} means all addresses; name one address")
    return family, str(address[0])


def refuse_taken(host: str, port: int) -> None:
    """Raise what `ScrapeServer` would raise. Nothing listens, so several processes may ask at once."""
    family, address = one_address(host)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))


def _end(client: socket.socket) -> None:
    """Make the thread that reads from or writes to a client return."""
    with suppress(OSError):  # it has gone
        client.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: ScrapeServer
    timeout = REQUEST_S
    server_version, sys_version = "megarl", ""

    def do_GET(self) -> None:
        """Answer with the page."""
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        # Bytes of a header that are no ASCII arrive as Latin-1 characters.
        same = hmac.compare_digest(given.strip().encode(), self.server.token)
        if kind.lower() != "bearer" or not same:
            self._answer(401, "text/plain", b"the token of the run is missing or wrong\n", "Bearer")
        elif self.path.partition("?")[0] != PATH:
            self._answer(404, "text/plain", f"only {PATH} is here\n".encode())
        else:
            self._answer(200, *self.server.page(self.headers.get("Accept", "")))

    def _answer(self, status: int, kind: str, content: bytes, challenge: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if challenge:
            self.send_header("WWW-Authenticate", challenge)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no request: there are several a minute for the whole run."""
