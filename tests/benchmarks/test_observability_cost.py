"""The benchmark of what it costs to see a run makes the calls of a run, and counts the writers' time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.observability as benchmark
from megarl.telemetry import events

CHEAP = (
    "events of trainer rank 0", "trajectories in the controller", benchmark.LOOPS, "steps of an engine in its replica",
    "entropy in the update of trainer rank 0",
)  # fmt: skip
observability_job: Any = sys.modules[benchmark.cpu_of_step.__module__]
SUMS = ("all of trainer rank 0", "all processes, of their processor time")


@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])  # MLflow's server and W&B start
def test_a_quick_run_has_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool) -> None:
    out = tmp_path / "rows.json"
    if not every:
        monkeypatch.setattr(benchmark, "ROWS", {name: benchmark.ROWS[name] for name in CHEAP})
    monkeypatch.setattr("sys.argv", ["observability.py", "--quick", "--json", str(out)])
    assert benchmark.main() == 0
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == [*benchmark.ROWS, *SUMS]
    assert {row["bound"] for row in rows} == {0.01} and not events.are_wanted("turn", 0)


def test_work_that_takes_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row grows by what is added to one of its calls. Other rows of rank 0 record no event."""
    size = benchmark.StepSize(seconds=1.0, trajectories=4)
    monkeypatch.setattr(benchmark, "ROWS", {name: benchmark.ROWS[name] for name in CHEAP})
    before = {row.name: row.ratio for row in benchmark.measure(size, steps=3, repeats=1)}
    record = events.record

    def slow(*given: object, **fields: object) -> None:
        sum(range(200_000))
        record(*given, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(events, "record", slow)
    after = {row.name: row.ratio for row in benchmark.measure(size, steps=3, repeats=1)}
    for name in (*CHEAP[:3], *SUMS):
        assert after[name] > before[name] + 0.01


def test_the_sum_counts_every_process_once_and_the_longer_loops_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {
        "events of trainer rank 0": 0.001, "trajectories in the controller": 0.01, benchmark.LOOPS: 7.0,
        "steps of an engine in its replica": 0.1,
    }  # fmt: skip
    rows: dict[str, Any] = {name: (lambda *_, cost=cost: (cost, {})) for name, cost in costs.items()}
    monkeypatch.setattr(benchmark, "ROWS", rows)
    size = benchmark.StepSize(seconds=1.0, cpu_seconds=2.0, ranks=4, replicas=3)
    *_, job = benchmark.measure(size, steps=1, repeats=1)
    assert job.name == SUMS[1] and job.ratio == pytest.approx((4 * 0.001 + 0.01 + 3 * 0.1) / 2.0) and not job.ok


def test_the_processor_time_of_a_step_is_that_of_all_processes_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with 5 s each before it; the first takes 1 s a step, the second ends, the third begins at 0."""
    (tmp_path / "metrics.jsonl").write_text("")
    assert observability_job.cpu_of_step(tmp_path, 2, 9.0) is None, "it has no processes"
    looks = iter([{1: 5.0, 2: 5.0}, {1: 5.0, 2: 5.0}, {1: 6.0, 2: 5.5, 3: 0.25}, {1: 7.0, 3: 0.5}])

    def process(pid: int, seconds: float) -> SimpleNamespace:
        times = SimpleNamespace(user=seconds, system=0.0)
        return SimpleNamespace(pid=pid, create_time=lambda: 0.0, cpu_times=lambda: times)

    def processes(*_: object) -> list[SimpleNamespace]:
        return [process(pid, seconds) for pid, seconds in next(looks).items()]

    steps = iter([3, 3, 5])
    monkeypatch.setattr(observability_job, "_last_step", lambda run_dir: next(steps))
    monkeypatch.setattr(observability_job, "_processes", processes)
    assert observability_job.cpu_of_step(tmp_path, 2, 9.0) == pytest.approx((2.0 + 0.5 + 0.5) / 2)


def test_steps_of_a_run_are_taken_from_its_metrics(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        benchmark.of_run(tmp_path, benchmark.StepSize())
    lines = [
        {"step": step, "time/step": step * 2.0, "batch/samples": 64, "agent/turns_mean": 3.2} for step in (9, 1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = benchmark.of_run(tmp_path, benchmark.StepSize())
    assert (size.seconds, size.trajectories, size.turns, size.mini_batches) == (4.0, 64, 3, 1)
