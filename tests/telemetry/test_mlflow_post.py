"""MLflow gets the request that its own client would make, and its refusals raise the same errors."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.telemetry.mlflow_post import Point, poster_of
from tests.support.mlflow_package import MISSING, mlflow_directory

pytestmark = pytest.mark.skipif(mlflow_directory() is None, reason=MISSING)
POINTS = [
    Point("reward/mean", 0.1, 1_700_000_000_123, 7),
    Point("policy/loss", -1.5e-7, 1_700_000_000_123, 7),
    Point("batch/tokens", 12800.0, 2**53, 8),
    Point("policy/updates", 0.0, 0, 0),
    *(Point("policy/grad_norm", value, 1, 2**40) for value in (math.nan, math.inf, -math.inf)),
]


class Listening:
    """An HTTP server that keeps the requests, and gives the answer it is told to."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str | None, Any]] = []
        self.answer: tuple[int, dict[str, str]] = (200, {})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                kind = self.headers["Content-Type"]
                outer.requests.append((self.path, kind, self.headers["Authorization"], content))
                status, answer = outer.answer
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a token")
    here = Listening()
    thread = threading.Thread(target=here.server.serve_forever, daemon=True)
    thread.start()
    yield here
    here.server.shutdown()
    here.server.server_close()
    thread.join(10)


def test_the_request_is_the_one_of_mlflows_client(listening: Listening) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    MlflowClient(tracking_uri=listening.uri).log_batch("a run", metrics=[Metric(*each) for each in POINTS])
    post = poster_of(listening.uri)
    assert post is not None
    post("a run", POINTS)
    by_client, by_us = listening.requests
    assert by_us == by_client
    assert by_us[2] == "Bearer a token" and len(by_us[3]["metrics"]) == len(POINTS)


def test_a_refusal_is_mlflows_error(listening: Listening) -> None:
    from mlflow import MlflowException

    listening.answer = 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such name"}
    post = poster_of(listening.uri)
    assert post is not None
    with pytest.raises(MlflowException, match="no such name") as caught:
        post("a run", POINTS)
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "databricks", "databricks://profile", "file:///runs", "runs"])
def test_only_a_server_behind_http_is_posted_to(uri: str) -> None:
    assert poster_of(uri) is None
