"""prometheus_client's WSGI page behind the run's bearer token, at one address, with bounds on clients."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from megarl.common.trust.signed_store import one_address

MOST_CLIENTS = 16
REQUEST_S = 10.0  # for a whole request


class ScrapeServer(ThreadingWSGIServer):
    """Serves the metrics of a registry at `url` until `stop`. HTTP/1.0: a connection carries one request."""

    def __init__(self, host: str, port: int, token: str, registry: CollectorRegistry) -> None:
        """Raises ValueError if `host` means all addresses, OSError if it is not an address of this machine or taken."""
        self.address_family, address = one_address(host)
        self._since: dict[socket.socket, float] = {}
        super().__init__((address, port), _Handler)
        self._page, self._token = make_wsgi_app(registry), token.encode()
        self.set_app(self._answer)
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{self.server_port}/metrics"
        threading.Thread(target=self.serve_forever, args=(0.5,), name="scrape-server", daemon=True).start()

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def stop(self) -> None:
        """Close the port. Does not wait for clients: their threads end with the process."""
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401  # as in the library
        """Count a client, unless too many are connected."""
        if len(self._since) < MOST_CLIENTS:
            self._since[request] = time.monotonic()
        return request in self._since

    def close_request(self, request: Any) -> None:  # noqa: ANN401  # as in the library
        """Forget a client, and close its connection."""
        self._since.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        """End the connections of clients that take too long for their request."""
        for client, since in list(self._since.items()):
            if time.monotonic() - since >= REQUEST_S:
                with suppress(OSError):  # the client is gone
                    client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # as in the library
        """Ignore errors of a client: they do not concern the run."""

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        kind, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        # Bytes of a header that are not ASCII arrive as Latin-1 characters.
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b"the token of the run is missing or wrong\n"]
        return self._page(environ, start_response)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Log no requests: there are several a minute."""
