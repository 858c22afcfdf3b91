"""The checks of the section `telemetry`."""

import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.checks.telemetry import telemetry_problems
from megarl.config.loading.load import config_from_tree
from tests.support.trainer.configs import tree

SERVER = "http://127.0.0.1:5000"


def problems(*, here: bool = True, **telemetry: Any) -> list[str]:
    config = config_from_tree(tree("model", telemetry=telemetry))
    return list(telemetry_problems(config.telemetry, config.launch, here=here))


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_reported_before_the_start(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    chosen = {"wandb_project": "p"} if package == "wandb" else {"mlflow_experiment": "e"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    (problem,) = problems(**chosen)
    assert f"{package} is not installed; pip install {package}" in problem
    assert problems(here=False, **chosen) == []


def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let there be a package mlflow, which a check must find and not import."""
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)


def test_mlflow_needs_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, tmp_path)
    (problem,) = problems(mlflow_experiment="e")
    assert problem.startswith("telemetry.mlflow_experiment: no tracking server") and "MLFLOW_TRACKING_URI" in problem
    assert problems(here=False, mlflow_experiment="e") == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    assert problems(mlflow_experiment="e") == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", ""])
def test_the_endpoint_never_listens_on_all_addresses(host: str) -> None:
    (problem,) = problems(prometheus_host=host, prometheus_port=9400)
    assert problem.startswith("telemetry.prometheus_host:") and "all addresses" in problem
    assert problems(prometheus_host="127.0.0.1", prometheus_port=9400) == []


def test_an_address_without_a_port_is_a_mistake() -> None:
    (problem,) = problems(prometheus_host="127.0.0.1")
    assert "telemetry.prometheus_port" in problem
