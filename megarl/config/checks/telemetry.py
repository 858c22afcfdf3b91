"""Checks of the sections `telemetry` (packages outside the locks, addresses, MLflow's server) and `monitor`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.checks.secrets import given_variables
from megarl.config.derived.staleness import pace_of
from megarl.config.schema import AdmissionConfig, Config
from megarl.config.schema.job import LaunchConfig, TelemetryConfig
from megarl.config.schema.monitor import MonitorConfig

MOST_LAGS = 16  # larger lags share the last one: they are rare, and too old to compare engines


@dataclass(frozen=True)
class SourceBuckets:
    """The buckets of tokens by source: a slot for each replica of a step, times the version lags.

    `slots`: the last one is for tokens whose replica has no slot or is unknown. `lags`: version lags 0, 1, ...; the
    last one includes all larger lags.
    """

    slots: int
    lags: int

    @classmethod
    def of(cls, config: Config) -> SourceBuckets:
        """Return the buckets of a run. A step may contain tokens of replicas that have been replaced."""
        replicas = config.rollout.max_replicas or config.rollout.replicas
        return cls(2 * replicas + 1, min(pace_of(config).max_staleness + 1, MOST_LAGS))

    @property
    def size(self) -> int:
        """The number of buckets."""
        return self.slots * self.lags

    def index(self, slot: int, lag: int) -> int:
        """Return the bucket of a slot and a lag."""
        return slot * self.lags + min(max(lag, 0), self.lags - 1)


def monitor_problems(monitor: MonitorConfig, admission: AdmissionConfig) -> Iterator[str]:
    """Yield the problems of the section `monitor` with others."""
    for name, rule in monitor.rules.items():
        if rule.action == "skip" and admission.max_uses > 1:
            yield (
                f"monitor.rules.{name}.action: a step that trains groups again (admission.max_uses="
                f"{admission.max_uses}) cannot be skipped, because these groups have ended already; use stop or "
                "warn, or set admission.max_uses=1"
            )


TRACKING_URI = "MLFLOW_TRACKING_URI"
ANY_ADDRESS = {"0.0.0.0", "::", "*", ""}


def telemetry_problems(telemetry: TelemetryConfig, launch: LaunchConfig, *, here: bool) -> Iterator[str]:
    """Yield the problems of the section. `here`: the run is on this machine."""
    if here and telemetry.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        yield "telemetry.wandb_project: wandb is not installed; pip install wandb, or leave it null"
    if here and telemetry.mlflow_experiment is not None:
        if importlib.util.find_spec("mlflow") is None:
            yield "telemetry.mlflow_experiment: mlflow is not installed; pip install mlflow-skinny, or leave it null"
        if TRACKING_URI not in given_variables(launch):
            yield (
                "telemetry.mlflow_experiment: no tracking server is set; set the environment variable "
                f"{TRACKING_URI} (http://HOST:5000)"
            )
    if telemetry.prometheus_host in ANY_ADDRESS:
        yield (
            f"telemetry.prometheus_host: {telemetry.prometheus_host!r} means all addresses; name one address of the "
            "node of trainer rank 0"
        )
    if telemetry.prometheus_host is not None and not telemetry.prometheus_port:
        yield "telemetry.prometheus_host: no endpoint listens there without telemetry.prometheus_port; set it too"
