"""Runs for benchmarks: which core a process gets, and what a window of steps says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib import whole_run
from benchmarks.lib.whole_run import (
    SCRIPT,
    Cores,
    Pinner,
    Window,
    part_of,
)
from tests.support.waiting import wait_until

CORES = Cores(frozenset({0}), frozenset({1}), frozenset({0, 1}))


REPLICA = ["ray::EngineReplica.generate"]


@pytest.mark.parametrize(
    ("command", "parent", "part", "cores"),
    [
        (["python", "-m", "torch.distributed.run", "--nproc-per-node", "1", str(SCRIPT)], [], "", CORES.others),
        (["python", "-u", str(SCRIPT), "--config", "x.yaml"], ["python"], "rank", CORES.trainer),
        (REPLICA, ["raylet"], "replica", CORES.engine),
        (["VLLM::EngineCore", ""], REPLICA, "engine", CORES.engine),
        (["python", "-c", "from multiprocessing.spawn import spawn_main"], REPLICA, "engine", CORES.engine),
        (["python", "-c", "from multiprocessing.resource_tracker import main"], REPLICA, "", CORES.others),
        (["ray::RolloutController"], ["raylet"], "", CORES.others),
        (["python", "-m", "megarl.rewards.worker"], ["ray::RolloutController"], "", CORES.others),
        ([], [], "", CORES.others),
    ],
)
def test_cores_by_command_line(command: list[str], parent: list[str], part: str, cores: frozenset[int]) -> None:
    assert part_of(command, parent) == part and CORES.of(part) == cores


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
        with pytest.raises(SystemExit, match="a run's engine or rank: names have changed"):
            pinner.check()
        pinner._pinned |= {"rank", "replica"}
        with pytest.raises(SystemExit, match="a run's engine: names"):
            pinner.check()
        pinner._pinned.add("engine")
        pinner.check()
    finally:
        pinner.stop()
        root.communicate(b"", timeout=10)


def record(end: float, **values: float) -> dict[str, float]:
    return {"wall_time": end, "batch/trained_samples": 10, "batch/loss_tokens": 100, **values}


def test_a_window_begins_at_the_end_of_the_last_skipped_step_and_has_so_many_steps() -> None:
    records = [record(100.0, **{"time/update": 50.0}), record(104.0, **{"time/generate": 1.0, "time/update": 2.0}),
               record(106.0, **{"time/drain": 0.5, "time/logprobs": 1.0, "time/sync": 0.5})]  # fmt: skip
    window = Window.of([*records, record(900.0)], 1, 2)
    assert window == Window(2, 20 / 6, 200 / 6, step_s=3.0, wait_s=0.75, train_s=1.5, sync_s=0.25)
    assert window.rest_s == 0.5
    assert "waiting for rollouts 0.750" in window.details()["seconds per step"]


@pytest.mark.parametrize(("skipped", "steps"), [(0, 1), (2, 1), (1, 2), (1, 0)])
def test_a_window_needs_a_step_before_it_and_all_of_its_own(skipped: int, steps: int) -> None:
    with pytest.raises(ValueError, match="cannot be measured"):
        Window.of([record(1.0), record(2.0)], skipped, steps)
