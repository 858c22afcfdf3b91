"""Peaks and silence of an engine."""

from types import SimpleNamespace
from typing import Any

from megarl.rollout.engine.engine_load import EngineLoad, EngineMonitor


def stats(usage: float, running: int, waiting: int) -> Any:
    return SimpleNamespace(kv_cache_usage=usage, num_running_reqs=running, num_waiting_reqs=waiting)


def test_a_report_has_the_peaks_since_the_last_one() -> None:
    monitor = EngineMonitor()
    for step in ((0.2, 5, 0), (0.9, 3, 2), (0.1, 4, 1)):
        monitor.record(stats(*step), None, mm_cache_stats=None, engine_idx=0)
    assert monitor.take() == EngineLoad(0.9, 5, 2)
    assert monitor.take() == EngineLoad()
    assert EngineLoad(0.1, 5, 0) | EngineLoad(0.3, 2, 1) == EngineLoad(0.3, 5, 1)


def test_silence_counts_from_the_last_step_the_last_pause_or_the_first_request() -> None:
    clock = [100.0]
    monitor = EngineMonitor(lambda: clock[0])
    clock[0] = 110.0
    assert monitor.silent_s(since=0.0) == 10.0 and monitor.silent_s(since=107.0) == 3.0
    assert monitor.silent_s(since=120.0) == 0.0
    monitor.hold("pause")
    monitor.hold("join")
    clock[0] = 150.0
    monitor.release("join")
    clock[0] = 160.0
    assert monitor.silent_s(since=0.0) == 0.0  # still paused
    monitor.release("pause")
    clock[0] = 165.0
    assert monitor.silent_s(since=0.0) == 5.0
    monitor.record(None)
    assert monitor.silent_s(since=0.0) == 0.0
