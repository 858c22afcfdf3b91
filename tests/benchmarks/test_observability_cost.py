"""The benchmark of what it costs to see a run makes the calls of a run, and counts the writers' time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.observability as benchmark
from megarl.telemetry import events

CHEAP = ("events of trainer rank 0", "trajectories in the controller")


@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])  # MLflow's server and W&B start
def test_a_quick_run_has_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool) -> None:
    out = tmp_path / "rows.json"
    if not every:
        monkeypatch.setattr(benchmark, "ROWS", {name: benchmark.ROWS[name] for name in CHEAP})
    monkeypatch.setattr("sys.argv", ["observability.py", "--quick", "--json", str(out)])
    assert benchmark.main() == 0
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == [*benchmark.ROWS, "all of trainer rank 0"]
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
    for name in (*CHEAP, "all of trainer rank 0"):
        assert after[name] > before[name] + 0.01


def test_steps_of_a_run_are_taken_from_its_metrics(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        benchmark.of_run(tmp_path, benchmark.StepSize())
    lines = [
        {"step": step, "time/step": step * 2.0, "batch/samples": 64, "agent/turns_mean": 3.2} for step in (9, 1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = benchmark.of_run(tmp_path, benchmark.StepSize())
    assert (size.seconds, size.trajectories, size.turns, size.mini_batches) == (4.0, 64, 3, 1)
