"""Whole runs on file systems of their own that are full: the run directory for a time, the checkpoints' for good."""

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.common.rundir.rotating_lines import read_lines
from megarl.common.rundir.run_files import read_exit
from megarl.rollout.resume.journal import JOURNAL_FILE
from megarl.rollout.resume.journal_file import groups_started
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.repository.needs import FAULTS, need
from tests.support.runs import small_disk as disks
from tests.support.runs.fault_table import moments
from tests.support.runs.run import start, step_records, tiny_config
from tests.support.runs.small_disk import fill, fill_up, small_disk, why_no_disk
from tests.support.runs.whole_runs import killed_after, longest_gap, start_run, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FULL_S = 20.0
STEPS, GROUPS, SAMPLES, EVERY = 24, 4, 4, 6
MODULE = "tests.support.rewards.reward_functions"


@pytest.fixture(autouse=True)
def _own_disks() -> None:
    need(FAULTS, why_no_disk())


def config_in(directory: Path, steps: int, **sections: Any) -> dict[str, Any]:
    return tiny_config(directory, steps=steps) | sections


def test_a_run_whose_directory_is_full_for_a_time_goes_on_and_its_files_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "SIZE", "64m")
    # 16 samples of 0.1 s in one process: the steps after the fifth take longer than the disk is full.
    reward = {"function": f"{MODULE}:slow_digit_share", "workers": 1}
    config = config_in(tmp_path, STEPS, reward=reward, telemetry={"samples_per_step": 2})
    config["evaluation"] |= {"every": EVERY}
    config["run"]["export"] = False
    run_dir, rng = Path(config["run"]["dir"]), moments()
    with small_disk(run_dir):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        process = start(tmp_path / "config.yaml")
        with killed_after(process, run_dir):
            wait_for_a_moment(rng, run_dir, process, 2.0)
            began = time.time()
            fill(run_dir, FULL_S, lambda: process.poll() is not None)
            ended = time.time()
            output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output[-4000:]
    check_files(run_dir, output, began, ended)
    assert_nothing_left(run_dir)


def wait_for_a_moment(rng: random.Random, run_dir: Path, process: subprocess.Popen[str], most_s: float) -> None:
    """Wait for one of the first five steps, and up to `most_s` seconds of what follows it."""
    step = rng.randint(1, 5)
    wait_for(lambda: len(step_records(run_dir)) >= step, process)
    time.sleep(rng.uniform(0.0, most_s))


def check_files(run_dir: Path, output: str, began: float, ended: float) -> None:
    """Every step and sample is there once, also of the time between; lost responses are reported."""
    records = step_records(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    since = sum(record["wall_time"] < began for record in records)
    print(f"full for {ended - began:.0f} s: {longest_gap(records, since, began):.1f} s without a step at most")
    assert any(began + 1 < record["wall_time"] < ended - 1 for record in records), "no step was made meanwhile"
    assert "No space left on device" in output and "metrics.jsonl could not be written" in output
    samples = [json.loads(line)["step"] for line in read_lines(run_dir / "samples.jsonl")]
    assert samples == [step for step in range(1, STEPS + 1) for _ in range(2)]
    labels = ["before", "after", *(f"step_{step}" for step in range(EVERY, STEPS, EVERY))]
    files = {label: run_dir / f"eval_{label}.jsonl" for label in labels}
    sizes = {label: len(json_lines(path)) for label, path in files.items() if path.exists()}
    assert len(set(sizes.values())) == 1 and sizes["before"] > 0, sizes
    assert all(f"{files[label]} could not be written" in output for label in files.keys() - sizes.keys())
    assert groups_started(run_dir / JOURNAL_FILE) == STEPS * GROUPS
    record = read_exit(run_dir)
    assert record is not None and (record.status, record.step) == ("finished", STEPS)
    assert json.loads((run_dir / "summary.json").read_text())["trained_samples"] == STEPS * GROUPS * SAMPLES


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_whose_directory_and_checkpoints_find_no_space_any_more_ends_as_failed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints have never fitted on their disk; that of the run directory is full for good after the first step."""
    steps, saves = 8, tmp_path / "saves"
    config = config_in(tmp_path, steps, checkpoint={"dir": str(saves), "every": 1}, evaluation={})
    config["run"]["export"] = False
    run_dir = Path(config["run"]["dir"])
    monkeypatch.setattr(disks, "SIZE", "64m")
    with small_disk(run_dir):
        monkeypatch.setattr(disks, "SIZE", "128k")
        with small_disk(saves):
            process = start_run(config)
            with killed_after(process, run_dir):
                wait_for(lambda: bool(step_records(run_dir)), process)
                fill_up(run_dir)
                recorded = len(step_records(run_dir))
                output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output[-4000:]
    assert 1 <= recorded < steps, "the disk was full too late"
    message = f"all {steps} steps are trained, but the checkpoint of step {steps}"
    assert output.count(f"megarl: {message}") == 1 and "No space left on device" in output, output[-4000:]
    assert "metrics.jsonl could not be written" in output
    for step in range(1, steps + 1):
        assert f"the checkpoint of step {step} could NOT be saved: " in output, output[-6000:]
    record = read_exit(run_dir)
    assert record is not None and (record.status, record.step) == ("failed", 0) and message in record.reason
    assert_nothing_left(run_dir)
