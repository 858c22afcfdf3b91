"""Posts metrics to an MLflow tracking server by its REST API (`runs/log-batch`), where that is how it is reached.

`MlflowClient.log_batch` makes two objects and a message of each value, and then indented JSON of them, which Python's
encoder in C does not do: three quarters of the processor time of a request. The request is MLflow's own otherwise, with
the credentials, headers, time limit and retries of its environment variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

ENDPOINT = "/api/2.0/mlflow/runs/log-batch"


class Point(NamedTuple):
    """One value of a metric. `timestamp`: Unix time in milliseconds."""

    key: str
    value: float
    timestamp: int
    step: int


Poster = Callable[[str, Sequence[Point]], None]


def poster_of(uri: str) -> Poster | None:
    """Return the function that logs points, by the id of their run; it raises what MLflow's client raises.

    None if the server at `uri` is not one that is reached by HTTP, or if this MLflow has no such functions: they are no
    part of its documented interface. Then its client has to log them.
    """
    if urlsplit(uri).scheme not in ("http", "https"):
        return None
    try:
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request, verify_rest_response
    except ImportError:
        return None

    def post(run_id: str, points: Sequence[Point]) -> None:
        credentials = get_default_host_creds(uri)  # at each request, as the client does: a token may be a new one
        answer = http_request(credentials, ENDPOINT, "POST", json=body(run_id, points))
        verify_rest_response(answer, ENDPOINT)

    return post


def body(run_id: str, points: Sequence[Point]) -> dict[str, object]:
    """Return the JSON content of the request. Numbers that JSON does not have are text, as protobuf writes them."""
    metrics = [
        {"key": key, "value": value if math.isfinite(value) else _named(value), "timestamp": timestamp, "step": step}
        for key, value, timestamp, step in points
    ]
    return {"run_id": run_id, "metrics": metrics}


def _named(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
