"""Runs for benchmarks: which core a process gets, and what a window of steps says."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import whole_run
from benchmarks.async_vs_sync import run_config
from benchmarks.trl_race import TASKS, Race
from benchmarks.whole_run import (
    SCRIPT,
    Cores,
    Pinner,
    Window,
    fresh,
    median_window,
    part_of,
    response_lengths,
    step_records,
    steps_after,
)
from megarl.config.pace import pace_of
from megarl.config.schema import Config
from megarl.rollout.admission import Admission
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


def configs(directory: Path) -> Iterator[tuple[str, dict[str, Any], int, int]]:
    """The runs of the benchmarks that are measured in steps: a name, the config, the steps before and in the window."""
    for mode in ("sync", "async"):
        for task in TASKS.values():
            race = Race.__new__(Race)
            race.task, race.model, race.data = task, directory / "model", directory / "data.jsonl"
            yield f"{task.name}, {mode}", race.config(mode), task.skip, task.steps
        options = argparse.Namespace(max_tokens=64, max_num_seqs=256)
        yield f"async_vs_sync, {mode}", run_config(options, directory, mode, groups=16, steps=24), 8, 16


def started(config: dict[str, Any], steps: int) -> list[int]:
    """Return the groups that admission has started when each step of a run is done, with engines that never are late.

    The trainer takes a step while it trains the one before.
    """
    content = Config.model_validate(config)
    pace, groups = pace_of(content), content.batch.groups
    admission = Admission(groups, pace, steps=steps)
    found: list[int] = []
    admission.set_version(0)
    for step in range(steps):
        for ahead in (step, step + 1) if pace.runs_ahead else (step,):
            for group in admission.admit():
                admission.finish(group, ok=True)
            if ahead < steps:
                assert admission.batch(ahead) is not None
        admission.commit(step, trained=groups, filtered=0, dropped_stale=0, failed=0)
        if pace.publishes_after(step + 1):
            admission.set_version(step + 1)
        found.append(admission.attempts)
    return found


def test_as_much_is_generated_in_a_window_as_is_trained(tmp_path: Path) -> None:
    for name, config, skip, window in configs(tmp_path):
        after = steps_after(config, window)
        assert (after > 0) == ("async" in name.partition(", ")[2]), name
        groups = config["batch"]["groups"]
        numbers = started(config, skip + window + after)
        assert numbers[skip + window - 1] - numbers[skip - 1] == window * groups, name
        if after:
            early = started(config, skip + window)
            assert early[-1] - early[skip - 1] < window * groups, "the end of the run would have helped"
            with pytest.raises(ValueError, match="published every 4 steps"):
                steps_after(config, window + 1)


@pytest.mark.parametrize(("mode", "after"), [("sync", 0), ("async", 6)])
def test_a_run_goes_on_after_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, after: int) -> None:
    """A stand-in for the run makes as many steps as its config asks for."""
    monkeypatch.setattr(
        whole_run, "train", lambda config, **named: [record(float(end)) for end in range(config["run"]["steps"])]
    )
    options = argparse.Namespace(max_tokens=64, max_num_seqs=256)
    config = run_config(options, tmp_path, mode, groups=16, steps=1)
    window, records = whole_run.measure(config, 8, 16, timeout_s=1.0)
    assert window.steps == 16 and len(records) == 8 + 16 + after


def test_the_run_of_the_median_counts() -> None:
    runs = [Window.of([record(0.0), record(seconds)], 1, 1) for seconds in (5.0, 1.0, 2.0)]
    assert median_window(runs) is runs[2] and median_window(runs[:2]) is runs[1]


def test_files_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/version": 0}\n{"step": 1, "time/step": 2.0}\n')
    (tmp_path / "samples.jsonl").write_text('{"response_tokens": 7}\n{"response_tokens": 9}\n')
    assert [each["step"] for each in step_records(tmp_path)] == [1]
    assert response_lengths(tmp_path) == [7, 9]
    assert fresh(tmp_path, "sync") != fresh(tmp_path, "sync")
