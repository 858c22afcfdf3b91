"""Runs for benchmarks: which core a process gets, and what a window of steps says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import whole_run
from benchmarks.whole_run import SCRIPT, Cores, Pinner, Window, fresh, median_window, response_lengths, step_records
from tests.support.waiting import wait_until

CORES = Cores(frozenset({0}), frozenset({1}), frozenset({0, 1}))


@pytest.mark.parametrize(
    ("command", "cores"),
    [
        (["python", "-m", "torch.distributed.run", "--nproc-per-node", "1", str(SCRIPT)], CORES.others),
        (["python", "-u", str(SCRIPT), "--config", "x.yaml"], CORES.trainer),
        (["ray::EngineReplica.generate"], CORES.engine),
        (["ray::RolloutController"], CORES.others),
        (["python", "-m", "megarl.rewards.worker"], CORES.others),
        ([], CORES.others),
    ],
)
def test_cores_by_command_line(command: list[str], cores: frozenset[int]) -> None:
    assert CORES.of(command) == cores


def test_two_cores_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert Cores.one_each() == Cores(frozenset({3}), frozenset({5}), frozenset({3, 5}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(SystemExit, match="two cores are needed"):
        Cores.one_each()


def test_threads_and_children_are_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child has a second thread, whose affinity is its own."""
    available = os.sched_getaffinity(0)
    if len(available) < 2:
        pytest.skip("one core only")
    wanted = frozenset({max(available)})
    monkeypatch.setattr(whole_run, "PIN_EVERY_S", 0.02)
    code = "import os, threading, sys; threading.Thread(target=sys.stdin.read).start(); print(os.getpid(), flush=True)"
    # A root of its own: other processes of this test session stay as they are.
    command = ["sh", "-c", f"{sys.executable} -c '{code}'; true"]
    root = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pinner = Pinner(root.pid, Cores(frozenset({-1}), frozenset({-2}), wanted))
    try:
        assert root.stdout is not None
        child = int(root.stdout.readline())
        tasks = [int(task) for task in os.listdir(f"/proc/{child}/task")]
        assert len(tasks) == 2
        wait_until(lambda: all(os.sched_getaffinity(task) == wanted for task in tasks), 10.0, "both threads")
        with pytest.raises(SystemExit, match="names have changed"):
            pinner.check()
    finally:
        pinner.stop()
        root.communicate(b"", timeout=10)


def record(end: float, **values: float) -> dict[str, float]:
    return {"wall_time": end, "batch/trained_samples": 10, "batch/loss_tokens": 100, **values}


def test_a_window_begins_at_the_end_of_the_last_skipped_step() -> None:
    records = [record(100.0, **{"time/update": 50.0}), record(104.0, **{"time/generate": 1.0, "time/update": 2.0}),
               record(106.0, **{"time/drain": 0.5, "time/logprobs": 1.0, "time/sync": 0.5})]  # fmt: skip
    window = Window.of(records, 1)
    assert window == Window(2, 20 / 6, 200 / 6, step_s=3.0, wait_s=0.75, train_s=1.5, sync_s=0.25)
    assert window.rest_s == 0.5
    assert "waiting for rollouts 0.750" in window.details()["seconds per step"]


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_window_needs_a_step_before_it_and_one_in_it(skipped: int) -> None:
    with pytest.raises(ValueError, match="at least 1 must be skipped"):
        Window.of([record(1.0), record(2.0)], skipped)


def test_the_run_of_the_median_counts() -> None:
    runs = [Window.of([record(0.0), record(seconds)], 1) for seconds in (5.0, 1.0, 2.0)]
    assert median_window(runs) is runs[2] and median_window(runs[:2]) is runs[1]


def test_files_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/version": 0}\n{"step": 1, "time/step": 2.0}\n')
    (tmp_path / "samples.jsonl").write_text('{"response_tokens": 7}\n{"response_tokens": 9}\n')
    assert [each["step"] for each in step_records(tmp_path)] == [1]
    assert response_lengths(tmp_path) == [7, 9]
    assert fresh(tmp_path, "sync") != fresh(tmp_path, "sync")
