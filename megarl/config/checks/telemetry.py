"""Checks of the section `telemetry`: packages that no lock contains, addresses, and where MLflow's server is."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from urllib.parse import urlsplit

from megarl.config.checks.secrets import given_variables
from megarl.config.schema import Config

TRACKING_URI = "MLFLOW_TRACKING_URI"
ANY_ADDRESS = {"0.0.0.0", "::", "*", ""}


def telemetry_problems(config: Config, *, here: bool) -> Iterator[str]:
    """Yield the problems of the section. `here`: the run will be on this machine."""
    telemetry = config.telemetry
    if here and telemetry.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        yield "telemetry.wandb_project: wandb is not installed; pip install wandb, or leave it null"
    if telemetry.mlflow_experiment is not None:
        yield from _mlflow_problems(config, here=here)
    elif telemetry.mlflow_uri is not None:
        yield "telemetry.mlflow_uri: nothing is logged without telemetry.mlflow_experiment; set it, or remove both"
    if telemetry.prometheus_host in ANY_ADDRESS:
        yield (
            f"telemetry.prometheus_host: {telemetry.prometheus_host!r} means all addresses; name one address of the "
            "node of trainer rank 0"
        )
    if telemetry.prometheus_host is not None and not telemetry.prometheus_port:
        yield "telemetry.prometheus_host: no endpoint listens there without telemetry.prometheus_port; set it too"


def _mlflow_problems(config: Config, *, here: bool) -> Iterator[str]:
    uri = config.telemetry.mlflow_uri
    if here and importlib.util.find_spec("mlflow") is None:
        yield "telemetry.mlflow_experiment: mlflow is not installed; pip install mlflow-skinny, or leave it null"
    if here and uri is None and TRACKING_URI not in given_variables(config):
        yield (
            "telemetry.mlflow_uri: there is no tracking server; set it (http://HOST:5000), or the environment variable "
            f"{TRACKING_URI}"
        )
    if uri is not None and urlsplit(uri).password is not None:
        yield (
            "telemetry.mlflow_uri: it holds a password, which would be written to config.yaml, checkpoints and "
            "trackers; put it into the environment variable MLFLOW_TRACKING_PASSWORD"
        )
