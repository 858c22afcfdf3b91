"""The space of events must be enough for the processes that write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.common.errors import ConfigError
from megarl.config.checks import check
from tests.support.configs import config
from tests.support.tiny import make_tiny_model


def test_too_little_space_for_many_processes_names_what_is_enough(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    wide = {"trainer__gpus": 512, "rollout__replicas": 512, "trainer__parallel": {}}
    few = config(tmp_path / "model", **wide, telemetry__events__mib=48.0)
    with pytest.raises(ConfigError) as refused:
        check(few, device="cpu", files=False)
    (told,) = [each for each in refused.value.problems if "telemetry" in each]
    assert told.startswith("telemetry.events.mib: 48 MiB are too little for the events of 1025 processes; set it to 49")
    for enough in (
        {"telemetry__events__mib": 49.0},
        {"telemetry__events__mib": 8.0, "telemetry__events__enabled": False},
    ):
        try:
            check(config(tmp_path / "model", **wide, **enough), device="cpu", files=False)
        except ConfigError as error:
            assert not [each for each in error.problems if "telemetry" in each]
