"""The start of an engine, read from the events of its replica."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from benchmarks.soak_starts import start_seconds
from megarl.telemetry import events
from tests.support.configs import config


def test_the_start_of_an_engine_ends_when_it_joins_a_publication(tmp_path: Path) -> None:
    """The events are written by a process itself; another process has none."""
    events.open_events(config("model"), tmp_path, "replica-3")
    began = time.time()
    with events.span("join_group"):
        pass
    events.close_events()
    assert start_seconds(tmp_path, os.getpid(), began - 20.0) == pytest.approx(20.0, abs=2.0)
    assert start_seconds(tmp_path, os.getpid() + 1, began) == 0.0


def test_only_the_first_publication_counts(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    header = {"pid": 7, "wall_ns": 1_000_000_000_000, "monotonic_ns": 50_000_000_000}
    lines = [header, {"n": "paused", "t": 51e6}, {"n": "join_group", "t": 55e6}, {"n": "join_group", "t": 90e6}]
    path = tmp_path / "events" / "replica-0.1.steps.000000.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert start_seconds(tmp_path, 7, 990.0) == 15.0
