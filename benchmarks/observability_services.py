"""The cost of Prometheus, MLflow and W&B in trainer rank 0: a real client scrapes, a real tracking server takes."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from observability_base import StepSize, cpu_per_step, recording, step_values

from megarl.telemetry.mlflow_remote import MlflowRemote
from megarl.telemetry.prometheus import PrometheusSink, read_endpoint
from megarl.telemetry.remote_sink import GATHER_S, MOST_AT_ONCE, Record
from megarl.telemetry.sinks import WandbSink

SCRAPE_S = 15.0  # between two scrapes, as in Prometheus's example configuration; its default is 60
STARTS_S = 300.0
MLFLOW_MISSING = (
    "MLflow is not here: make setup-test, or set MEGARL_MLFLOW to a directory made by "
    "pip install --no-deps --target DIR -r requirements/mlflow.lock"
)
WANDB_MISSING = "wandb is not here: make setup-test, or pip install wandb"
# Scrapes once for each line that it reads.
_CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + open(sys.argv[2]).read().strip()})
for _ in sys.stdin:
    print(len(urllib.request.urlopen(request, timeout=60).read()), flush=True)
"""


def of_prometheus(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The snapshot of each step, and a scrape of each `SCRAPE_S` by another process, of metrics that are new to it."""
    with recording(directory, "", prometheus_port=free_port()) as config:
        sink, values = PrometheusSink(config), step_values()
        sink.listen()
        try:
            alone = cpu_per_step(lambda number: sink.write(number + 1, values), steps)
            with _scraping(directory) as scrape:
                scrape()

                def scraped(number: int) -> None:
                    sink.write(number + 1, values)
                    scrape()

                one = cpu_per_step(scraped, steps) - alone
                size_of_text = scrape()
        finally:
            sink.close()
    details = {"scrape_s": SCRAPE_S, "cpu_ms_per_scrape": round(one * 1000, 3), "scrape_bytes": size_of_text}
    return alone + max(0.0, one) * size.seconds / SCRAPE_S, {"metrics": len(values), **details}


@contextmanager
def _scraping(directory: Path) -> Iterator[Callable[[], int]]:
    """Give a function that has another process scrape once; it returns the bytes of the page."""
    endpoint = read_endpoint(directory)
    assert endpoint is not None
    command = [sys.executable, "-c", _CLIENT, endpoint.url, endpoint.token_file]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None and client.stdout is not None
    read, write = client.stdout, client.stdin

    def scrape() -> int:
        write.write("\n")
        write.flush()
        if not (answer := read.readline()):
            raise RuntimeError(f"the client of the scrapes has ended with {client.wait(10)}")
        return int(answer)

    try:
        yield scrape
    finally:
        client.kill()
        client.wait(10)


def of_mlflow(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The metrics of each step, sent to a tracking server on this machine: with those of `GATHER_S`, as the sink does.

    The sink's own thread is left out; it appends a record to a list.
    """
    path = mlflow_directory()
    if path is None:
        raise FileNotFoundError(MLFLOW_MISSING)
    directory.mkdir(exist_ok=True)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(STARTS_S)))  # other work may be on the machine
    together = min(MOST_AT_ONCE, max(1, round(GATHER_S / size.seconds)))
    with (
        _tracking_server(directory, path) as uri,
        recording(directory, "", mlflow_experiment="cost", mlflow_uri=uri) as config,
    ):
        remote, values = MlflowRemote(config), step_values()

        def send(number: int) -> None:
            remote.send([Record(number * together + each, time.time(), dict(values)) for each in range(together)])

        seconds = cpu_per_step(send, max(2, steps // together)) / together
        remote.finish("finished")
    return seconds, {"metrics": len(values), "steps_together": together}


def of_wandb(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The metrics of each step, given to Weights & Biases offline: its library hands them to a process of its own.

    The details have that process's time too: it has a core of its own, and is no part of the ratio.
    """
    os.environ.update({"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    if importlib.util.find_spec("wandb") is None:
        raise FileNotFoundError(WANDB_MISSING)
    with recording(directory, "") as config:
        sink, values = WandbSink("cost", config), step_values()
        others = [psutil.Process(each.pid) for each in psutil.Process().children() if "wandb-core" in each.name()]
        before = [sum(each.cpu_times()[:2]) for each in others]
        seconds = cpu_per_step(lambda number: sink.write(number + 1, values), steps, lambda: None)
        core = sum(sum(each.cpu_times()[:2]) for each in others) - sum(before)
        sink.close()
    return seconds, {"metrics": len(values), "wandb_core_ms_per_step": round(core / steps * 1000, 3)}


@contextmanager
def _tracking_server(directory: Path, package: Path) -> Iterator[str]:
    """A server of its own, with a database in `directory`; its address."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    paths = os.pathsep.join([*(path for path in sys.path if path.endswith("site-packages")), str(package)])
    store = ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db", "--artifacts-destination", str(directory)]
    log = directory / "mlflow_server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, "--workers=1", "--host=127.0.0.1", f"--port={port}"],
            env={**os.environ, "PYTHONPATH": paths, "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip

    def healthy() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"MLflow's server has ended: {log.read_text(errors='replace')[-2000:]}")
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
                return bool(answer.read() == b"OK")
        except OSError:
            return False

    try:
        _wait_until(healthy, STARTS_S, "MLflow's server to start")
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def mlflow_directory() -> Path | None:
    """Return the directory of the package, which is then part of `sys.path`; None if there is none."""
    path = Path(os.environ.get("MEGARL_MLFLOW") or Path(sys.prefix) / "mlflow")
    if not (path / "mlflow" / "__init__.py").is_file():
        return None
    if str(path) not in sys.path:
        sys.path.append(str(path))  # at the end: what is locked comes first
    return path


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"the benchmark waited {timeout_s:.0f} s for {what}")
        time.sleep(0.05)
