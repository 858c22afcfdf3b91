"""The real MLflow: a database of its own, and a tracking server that comes and goes."""

import contextlib
import io
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.common.rundir.run_files import ExitRecord
from megarl.config.schema import Config
from megarl.run.ranks.failure import set_aside
from megarl.telemetry.sinks import remote_sink
from megarl.telemetry.sinks.mlflow import ID_TAG, MlflowSink, key_of, parameters_of
from megarl.telemetry.sinks.remote_sink import LostRecords, Record
from megarl.telemetry.sinks.sinks import MetricsWriter
from tests.support.telemetry.mlflow_package import MISSING, mlflow_directory
from tests.support.trainer.configs import config
from tests.support.waiting import wait_until

DIRECTORY = mlflow_directory()
needs_mlflow = pytest.mark.skipif(DIRECTORY is None, reason=MISSING)
VALUES = {"reward/mean": 0.5, "eval/held-out/pass@8": 0.25, "policy/loss": -0.01}


def at(uri: str, run_dir: Path, **changes: Any) -> Config:
    os.environ["MLFLOW_TRACKING_URI"] = uri
    telemetry = {"mlflow_experiment": "small models"}
    timeouts = {"shutdown_s": 240}  # of which MLflow has half; a busy machine may need it
    return config(
        "model", run__dir=str(run_dir), run__name="one run", telemetry=telemetry, timeouts=timeouts, **changes
    )


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # so that it is restored


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, which MLflow takes seconds to make."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def client(uri: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri=uri)


def runs(uri: str) -> list[Any]:
    here = client(uri)
    return list(here.search_runs([each.experiment_id for each in here.search_experiments()]))


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in client(uri).get_metric_history(run_id, key)]


@needs_mlflow
def test_every_metric_the_config_and_the_end_of_a_run_are_there(database: str, tmp_path: Path) -> None:
    chosen = at(database, tmp_path)
    with MetricsWriter.open(chosen, io.StringIO()) as writer:
        for step in range(1, 41):
            writer.write(step, VALUES | {"reward/mean": step / 40, "policy/grad_norm": math.nan})
        writer.write_exit(ExitRecord("finished", 40, ""))
    assert writer.failures == 0
    (run,) = runs(database)
    assert run.info.run_name == "one run" and run.info.status == "FINISHED"
    assert client(database).get_experiment(run.info.experiment_id).name == "small models"
    assert history(database, run.info.run_id, "reward/mean") == [(step, step / 40) for step in range(1, 41)]
    assert set(run.data.metrics) == {"reward/mean", "eval/held-out/pass_at_8", "policy/loss", "policy/grad_norm"}
    assert math.isnan(run.data.metrics["policy/grad_norm"])
    assert run.data.params["run.steps"] == "4" and run.data.params["sampling.max_tokens"] == "32"
    assert run.data.params == parameters_of(chosen.model_dump(mode="json"))


@needs_mlflow
def test_a_resume_goes_on_in_the_same_run_and_a_new_history_does_not(database: str, tmp_path: Path) -> None:
    chosen = at(database, tmp_path / "run")
    for status, steps in (("preempted", (1, 2)), (None, (2, 3)), ("finished", (4,))):
        with MetricsWriter.open(chosen, io.StringIO()) as writer:
            for step in steps:
                writer.write(step, {"reward/mean": float(step)})
            if status is not None:
                writer.write_exit(ExitRecord(status, steps[-1], ""))  # type: ignore[arg-type]
        (run,) = runs(database)
        assert run.info.status == {"preempted": "KILLED", None: "FAILED", "finished": "FINISHED"}[status]
    assert [step for step, _ in history(database, run.info.run_id, "reward/mean")] == [1, 2, 2, 3, 4]
    set_aside(tmp_path / "run")
    with MetricsWriter.open(chosen, io.StringIO()) as writer:
        writer.write(1, VALUES)
    assert len(runs(database)) == 2


@needs_mlflow
def test_a_run_is_marked_as_running_again(database: str, tmp_path: Path) -> None:
    remote = MlflowSink(at(database, tmp_path))
    remote.send([Record(1, 1.0, VALUES)])
    remote.finish("preempted")
    again = MlflowSink(at(database, tmp_path))
    again.send([Record(2, 2.0, VALUES)])
    (run,) = runs(database)
    assert run.info.status == "RUNNING" and len(run.data.tags[ID_TAG]) == 16


@needs_mlflow
def test_a_lost_answer_makes_no_second_run(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    real, lost = mlflow.MlflowClient.create_run, []

    def create(self: Any, *arguments: Any, **more: Any) -> Any:
        run = real(self, *arguments, **more)
        if not lost:
            lost.append(run)
            raise ConnectionError("the answer was lost")
        return run

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", create)
    remote = MlflowSink(at(database, tmp_path))
    with pytest.raises(ConnectionError):
        remote.send([Record(1, 1.0, VALUES)])
    remote.send([Record(1, 1.0, VALUES)])
    (run,) = runs(database)
    assert run.data.params == parameters_of(at(database, tmp_path).model_dump(mode="json"))
    assert run.data.metrics["reward/mean"] == 0.5


@needs_mlflow
def test_more_values_than_a_request_may_have(database: str, tmp_path: Path) -> None:
    values = {f"reward/component/c{index}": float(index) for index in range(1201)}
    MlflowSink(at(database, tmp_path)).send([Record(1, 1.0, values), Record(2, 2.0, values)])
    (run,) = runs(database)
    assert len(run.data.metrics) == 1201
    assert history(database, run.info.run_id, "reward/component/c1200") == [(1, 1200.0), (2, 1200.0)]


@needs_mlflow
def test_what_the_server_refuses_for_good_is_not_sent_again(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _is_refused_for_good(database, tmp_path, monkeypatch)


def _is_refused_for_good(uri: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.telemetry.sinks import mlflow as mlflow_sink

    remote = MlflowSink(at(uri, run_dir))
    monkeypatch.setattr(mlflow_sink, "key_of", lambda name: name)
    with pytest.raises(LostRecords, match=r"refuses the metrics of steps 5 to 5.*pass@8"):
        remote.send([Record(5, 5.0, VALUES)])


@needs_mlflow
def test_names_are_those_that_mlflow_takes() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for name in ("eval/a set/pass@8", "eval/Größe?/maj@4", "reward/component/x*y", "r" * 300):
        _validate_metric_name(key_of(name))
    assert key_of("eval/h/pass@8") == "eval/h/pass_at_8" and key_of("reward/mean") == "reward/mean"


@contextlib.contextmanager
def serving(directory: Path, port: int) -> Iterator[None]:
    """A tracking server, which is killed at the end."""
    assert DIRECTORY is not None
    paths = os.pathsep.join([*(path for path in sys.path if path.endswith("site-packages")), str(DIRECTORY)])
    store = ["--backend-store-uri", f"sqlite:///{directory}/server.db", "--artifacts-destination", str(directory / "a")]
    with (directory / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, "--workers=1", "--host=127.0.0.1", f"--port={port}"],
            env={**os.environ, "PYTHONPATH": paths, "MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:

        def healthy() -> bool:
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read() == b"OK"
            except OSError:
                assert server.poll() is None, (directory / "server.log").read_text()
                return False

        wait_until(healthy, 120, "MLflow's server")
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


@pytest.mark.slow  # two starts of the server; test_remote_sink.py has a service that fails and comes back
@needs_mlflow
def test_a_server_that_is_away_loses_no_step_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_sink, "LONGEST_PAUSE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    uri, terminal = f"http://127.0.0.1:{port}", io.StringIO()
    with MetricsWriter.open(at(uri, tmp_path), terminal) as writer:
        writer.write(1, VALUES)
        wait_until(lambda: writer.failures > 0, 120, "a failure")  # the server is not there yet
        with serving(tmp_path, port):
            writer.write(2, VALUES | {"policy/grad_norm": math.nan})
            wait_until(lambda: bool(runs(uri)), 120, "the run")
            (run,) = runs(uri)
            wait_until(lambda: len(history(uri, run.info.run_id, "reward/mean")) == 2, 60, "both steps")
        writer.write(3, VALUES)
        failures = writer.failures
        wait_until(lambda: writer.failures > failures, 120, "a failure without the server")
        with serving(tmp_path, port):
            writer.write(4, VALUES)
            writer.write_exit(ExitRecord("finished", 4, ""))
            writer.close()
            (run,) = runs(uri)
            assert run.info.status == "FINISHED"
            assert [step for step, _ in history(uri, run.info.run_id, "reward/mean")] == [1, 2, 3, 4]
            assert run.data.metrics.keys() == {"eval/held-out/pass_at_8", *list(VALUES)[::2], "policy/grad_norm"}
            assert math.isnan(run.data.metrics["policy/grad_norm"])
            _is_refused_for_good(uri, tmp_path, monkeypatch)
    assert "MLflow could not be written" in terminal.getvalue()


def test_mlflow_missing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match="pip install mlflow-skinny"):
        MetricsWriter.open(at("http://127.0.0.1:1", tmp_path), io.StringIO())
