"""The endpoint from which Prometheus scrapes the newest metrics of the run.

A step only replaces the snapshot for the next scrape, so no scrape can delay it. prometheus_client writes the text.
"""

import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from megarl.common.errors import ConfigError
from megarl.common.files import write_private
from megarl.common.trust.run_secret import derived_key, run_secret
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE, one_address
from megarl.config.schema import Config
from megarl.config.schema.job import TelemetryConfig
from megarl.telemetry.sinks import prometheus_names as names

# prometheus_client's WSGI page behind the run's bearer token, at one address, with bounds on clients.

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


ENDPOINT_FILE = "prometheus.json"
TOKEN_FILE = "prometheus_token"
_PURPOSE = "scrapes of Prometheus"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Endpoint:
    """Content of RUN_DIR/prometheus.json. `pid`: the process that listens on `port`."""

    url: str
    token_file: str
    pid: int
    port: int


def read_endpoint(run_dir: Path) -> Endpoint | None:
    """Return a run's endpoint; None if its file is missing or damaged."""
    try:
        return msgspec.json.decode((run_dir / ENDPOINT_FILE).read_bytes(), type=Endpoint)
    except (OSError, msgspec.DecodeError):
        return None


@dataclass(frozen=True)
class _Snapshot:
    """The values that a scrape shows."""

    values: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    wall_time: float = 0.0


class PrometheusSink(Collector):
    """Serves the newest value of each metric by HTTP, from `listen` to `close`."""

    name = "Prometheus"

    def __init__(self, config: Config) -> None:
        self._config, self._run_dir = config, config.run_dir.resolve()
        self._snapshot = _Snapshot()
        self._server: ScrapeServer | None = None

    def listen(self) -> None:
        """Open the port. Raises ConfigError if that fails."""
        token, file = derived_key(run_secret(self._run_dir), _PURPOSE).hex(), self._run_dir / TOKEN_FILE
        write_private(file, token + "\n")
        host, port = _address(self._config.telemetry)
        try:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(self)
            self._server = ScrapeServer(host, port, token, registry)
        except (OSError, ValueError) as error:
            raise ConfigError([_cannot_listen(host, port, error)]) from None
        endpoint = Endpoint(self._server.url, str(file), os.getpid(), port)
        write_private(self._run_dir / ENDPOINT_FILE, json.dumps(asdict(endpoint), indent=1) + "\n")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show these values, and the earlier values of all other metrics.

        A step drops earlier values of metrics with labels, such as those of each replica.
        """
        before, of_step = self._snapshot, "time/step" in values
        kept = {name: value for name, value in before.values.items() if not (of_step and _goes_with_its_step(name))}
        self._snapshot = _Snapshot({**kept, **values}, max(step, before.step), time.time())
        if self._server is None:
            self.listen()

    def roll_back(self, step: int) -> None:
        """Show `step` as the newest step, and no metric until the next one."""
        self._snapshot = _Snapshot({}, step, self._snapshot.wall_time)

    def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            (self._run_dir / ENDPOINT_FILE).unlink(missing_ok=True)
            self._server.stop()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every metric that has a value, all from one snapshot."""
        snapshot = self._snapshot
        yield self._family(names.INFO, [((str(self._config.run_dir), version("megarl")), 1.0)])
        for name, value in (
            (names.STEPS_DONE, snapshot.step),
            (names.STEPS_PLANNED, self._config.run.steps),
            (names.LAST_STEP, snapshot.wall_time),
        ):
            yield self._family(name, [((), value)])
        for name, found in names.samples(snapshot.values):
            yield self._family(name, found)

    def _family(self, name: names.PrometheusName, found: list[tuple[tuple[str, ...], float]]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name.name, name.text, labels=(names.RUN_LABEL, *name.labels))
        for labels, value in found:
            family.add_metric((self._config.run.name, *labels), value)
        return family


def _goes_with_its_step(name: str) -> bool:
    """Return whether a value is valid only for its step. An evaluation is valid until the next one of its set."""
    return bool(names.place_of(name)[0].labels) and not name.startswith("eval/")


def check_endpoint(telemetry: TelemetryConfig) -> None:
    """Raise ConfigError if the endpoint of a run that starts on this node could not listen."""
    if telemetry.prometheus_port:
        host, port = _address(telemetry)
        try:
            family, address = one_address(host)
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # binds only: several processes may ask at once
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except (OSError, ValueError) as error:
            raise ConfigError([_cannot_listen(host, port, error)]) from None


def _address(telemetry: TelemetryConfig) -> tuple[str, int]:
    """Return host and port of the endpoint; the default host is the address at which the run's sockets listen."""
    host = telemetry.prometheus_host or os.environ.get(NODE_ADDRESS_VARIABLE, _LOOPBACK)
    return host, telemetry.prometheus_port


def _cannot_listen(host: str, port: int, error: Exception) -> str:
    return (
        f"telemetry.prometheus_port: port {port} at {host} cannot be used ({error}); choose another port, or 0 for no "
        "endpoint; telemetry.prometheus_host must be an address of the node of trainer rank 0"
    )
