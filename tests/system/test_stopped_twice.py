"""A second stop signal in any phase of a launch: all of it ends at once, and one message says how to go on."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.lib.chaos import version_being_published
from megarl.cluster.pool.pool_process import read_state
from tests.support.pool.leftovers import survivors
from tests.support.runs.run import step_records, tiny_config
from tests.support.runs.two_signals import check_end, launch, press_twice
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FEW_STEPS = 2  # of a run that comes to its end


def slow_config(directory: Path, steps: int) -> dict[str, Any]:
    """It saves after every step, and evaluates slowly before the first one and after the last one.

    Each response that is scored then touches the file `evaluating`.
    """
    config = tiny_config(directory, steps=steps)
    config["checkpoint"] = {"every": 1}
    config["telemetry"] = {"dump_batches": True}  # the schedule tells when a version is published
    function = "tests.support.rewards.reward_functions:slow_and_marked"
    config["evaluation"]["sets"][0]["reward"] = {
        "function": function,
        "kwargs": {"mark": str(directory / "evaluating")},
    }
    config["reward"]["trial_call"] = False  # it would leave the mark
    return config


def starts(run_dir: Path) -> bool:
    """The engines are being started."""
    return (read_state(run_dir) or {}).get("state") == "starting"


def evaluates(run_dir: Path) -> bool:
    return (run_dir.parent / "evaluating").exists()


def syncs(run_dir: Path) -> bool:
    """A version is being published, and not the first one."""
    return bool(step_records(run_dir)) and version_being_published(run_dir) is not None


def saves(run_dir: Path) -> bool:
    """A checkpoint is being written, and not the first one."""
    return any((run_dir / "checkpoints").glob("iter_*")) and any((run_dir / "checkpoints").glob(".iter_*.partial"))


def ends(run_dir: Path) -> bool:
    """All steps are made, and the final evaluation scores its responses."""
    steps = step_records(run_dir)
    return len(steps) == FEW_STEPS and (run_dir.parent / "evaluating").stat().st_mtime > steps[-1]["wall_time"]


@pytest.mark.parametrize(("phase", "number"), [
    (starts, signal.SIGINT), (starts, signal.SIGTERM),
    (evaluates, signal.SIGINT), (syncs, signal.SIGTERM),
    (saves, signal.SIGINT), (ends, signal.SIGTERM),
])  # fmt: skip
def test_a_second_signal_ends_everything_in_each_phase(
    tmp_path: Path, phase: Callable[[Path], bool], number: signal.Signals
) -> None:
    path, log, run_dir = tmp_path / "config.yaml", tmp_path / "launch.log", tmp_path / "run"
    path.write_text(yaml.safe_dump(slow_config(tmp_path, FEW_STEPS if phase is ends else 100_000)))
    process, deadline = launch(path, log), time.monotonic() + 240.0
    try:
        while not phase(run_dir):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, f"{phase.__name__}: not seen\n{log.read_text()[-4000:]}"
            time.sleep(0.002)
        press_twice(process, number, log)
        check_end(process, number, log, run_dir, f"{phase.__name__}, {number.name}")
    finally:
        for each in (process, *survivors(run_dir)):
            each.kill()


# By experience: the engines start for 40 s after the claim, then the run takes steps and saves.
@pytest.mark.parametrize(("seed", "first_s", "last_s"), [(0, 0.0, 30.0), (2, 40.0, 70.0)])
def test_ctrl_c_twice_ends_everything_at_any_moment(tmp_path: Path, seed: int, first_s: float, last_s: float) -> None:
    path, log, run_dir = tmp_path / "config.yaml", tmp_path / "launch.log", tmp_path / "run"
    path.write_text(yaml.safe_dump(plain_config(tmp_path)))
    moment = random.Random(f"stopped-twice-{seed}").uniform(first_s, last_s)
    process = launch(path, log)
    try:
        wait_until(lambda: (run_dir / "claim.json").exists() or process.poll() is not None, 120, "the node's agent")
        time.sleep(moment)
        assert process.poll() is None, log.read_text()[-4000:]
        press_twice(process, signal.SIGINT, log)
        check_end(process, signal.SIGINT, log, run_dir, f"{moment:.1f} s after the claim")
    finally:
        for each in (process, *survivors(run_dir)):
            each.kill()
    assert not (run_dir / "claim.json").exists()


def test_one_ctrl_c_ends_what_has_not_started(tmp_path: Path) -> None:
    """The config is being read, from a FIFO that nobody writes to: there is nothing to save and nothing else to end."""
    path, log, run_dir = tmp_path / "config.yaml", tmp_path / "launch.log", tmp_path / "run"
    os.mkfifo(path)
    process = launch(path, log)
    writer: list[int] = []

    def read() -> bool:
        with suppress(OSError):  # ENXIO while nobody reads
            writer.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writer)

    try:
        wait_until(read, 60, "the check of the config")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120.0) != 0
    finally:
        for each in (process, *survivors(run_dir)):
            each.kill()
        for descriptor in writer:
            os.close(descriptor)
    message = "megarl: interrupted before anything was started; the same command starts the run\n"
    assert log.read_text() == message and not run_dir.exists()


def plain_config(directory: Path) -> dict[str, Any]:
    """It saves after every step, and evaluates nothing."""
    config = tiny_config(directory, steps=100_000)
    config["evaluation"], config["checkpoint"] = {}, {"every": 1}
    return config
