"""Logs to an MLflow tracking server. The locked requirements do not contain the package; the user must install it.

A resumed run continues the same MLflow run. RUN_DIR/mlflow.json has an id chosen before any request. MLflow's run is
tagged with it and found by it, even if the response to its creation was lost. Repeated steps appear twice, with
different times.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from megarl.common.rundir.run_files import Status
from megarl.common.values import JsonValue, leaves
from megarl.config.schema import Config
from megarl.telemetry.sinks.remote_sink import LostRecords, Record, RemoteSink, own_id

if TYPE_CHECKING:
    from mlflow import MlflowClient

MLFLOW_FILE = "mlflow.json"
ID_TAG = "megarl.run"
# Limits of the server per request (mlflow.utils.validation); the length of a parameter is that of servers before 2.0.
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_PARAMETER, _LONGEST_KEY = 1000, 100, 500, 250
_MOST_KEYS = 4096  # cached names of metrics; every step has the same ones
# Unless the user has set them. The sink resends by itself, and sees a failed request only when MLflow gives up.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # s; 120 by default
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # 7 by default, with pauses of minutes
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow 3 would report each use to its makers
}
_STATUS = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED", None: "FAILED"}
_NEVER_TAKEN = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}

T = TypeVar("T")


class MlflowSink(RemoteSink):
    """The run of `config` in MLflow; connects with the first records."""

    name = "MLflow"

    def __init__(self, config: Config) -> None:
        """Raises ValueError if MLflow is not installed."""
        # Half of the time in which all sinks must close.
        super().__init__(config.timeouts.shutdown_s / 2)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import mlflow
        except ImportError:
            raise ValueError(
                "telemetry.mlflow_experiment: mlflow is not installed; pip install mlflow-skinny, or leave it null"
            ) from None
        self._mlflow = mlflow
        self._config = config
        self._id = own_id(config.run_dir / MLFLOW_FILE)
        self._client: MlflowClient | None = None
        self._run_id = ""

    def send(self, records: Sequence[Record]) -> None:
        """Log records. Raises LostRecords for those that the server will never accept, and MLflow's errors."""
        client = self._connected()
        metrics = [
            self._mlflow.entities.Metric(key_of(name), float(value), int(record.wall_time * 1000), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        for some in _in_parts(metrics, _MOST_METRICS):
            try:
                client.log_batch(self._run_id, metrics=some)
            except self._mlflow.MlflowException as error:
                if error.error_code in _NEVER_TAKEN:
                    steps = f"steps {records[0].step} to {records[-1].step}"
                    raise LostRecords(f"the server refuses the metrics of {steps}: {error}") from error
                raise

    def finish(self, status: Status | None) -> None:
        """Set the state of the run: FINISHED, KILLED if it was preempted, else FAILED."""
        self._connected().set_terminated(self._run_id, _STATUS[status])

    def _connected(self) -> MlflowClient:
        """Return the client after creating the run and marking it as running."""
        client = self._client = self._client or self._mlflow.MlflowClient()
        if self._run_id:
            return client
        experiment = self._experiment(client, str(self._config.telemetry.mlflow_experiment))
        found = client.search_runs([experiment], filter_string=f"tags.`{ID_TAG}` = '{self._id}'")
        if found:
            run_id = found[0].info.run_id
            client.update_run(run_id, status="RUNNING")
        else:
            tags = {ID_TAG: self._id, "run_dir": str(self._config.run_dir), "megarl_version": version("megarl")}
            run_id = client.create_run(experiment, run_name=self._config.run.name, tags=tags).info.run_id
        if not found or not found[0].data.params:
            parameter, settings = self._mlflow.entities.Param, self._config.model_dump(mode="json")
            parameters = [parameter(key, value) for key, value in parameters_of(settings).items()]
            for some in _in_parts(parameters, _MOST_PARAMETERS):
                client.log_batch(run_id, params=some)
        self._run_id = run_id
        return client

    def _experiment(self, client: MlflowClient, name: str) -> str:
        """Return the id of an experiment; create it if there is none."""
        if (found := client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(client.create_experiment(name))
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(client.get_experiment_by_name(name).experiment_id)  # another run has just created it


@lru_cache(_MOST_KEYS)
def key_of(name: str) -> str:
    """Return the name of a metric in MLflow: `pass@8` is `pass_at_8`; characters that MLflow refuses become `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)[:_LONGEST_KEY]


def parameters_of(settings: JsonValue) -> dict[str, str]:
    """Return the leaves of a config by dotted key, with long values cut."""
    return {
        key_of(key): (value if isinstance(value, str) else json.dumps(value))[:_LONGEST_PARAMETER]
        for key, value in leaves(settings)
    }


def _in_parts(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Yield the items in their order, `most` at a time."""
    for first in range(0, len(items), most):
        yield items[first : first + most]
