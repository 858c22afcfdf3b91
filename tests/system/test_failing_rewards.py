"""Whole runs whose reward function fails always, never returns, or whose processes are killed."""

import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import start, step_records, tiny_config, train
from tests.support.runs.whole_runs import killed_after

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MODULE = "tests.support.rewards.reward_functions"


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("broken", "LookupError: the judge has no key"),
        ("endless", "no reward after 0.5 s"),
    ],
)
def test_a_function_that_always_fails_ends_the_run_with_its_own_message(
    tmp_path: Path, name: str, reported: str
) -> None:
    config = tiny_config(tmp_path, steps=3)
    config["reward"] = {"function": f"{MODULE}:{name}", "timeout_s": 0.5, "trial_call": False}
    run = train(config)
    assert run.code != 0
    ending = f"the reward function '{MODULE}:{name}' failed for 16 of the latest 16 samples"
    assert ending in run.output and run.output.count(ending) == 1
    assert reported in run.output.partition(ending)[0], "the first failure is reported before the run ends"
    assert reported in run.output.partition(ending)[2]
    assert "\x1b[31m" not in run.output.partition(ending)[0]
    for file in ("exit.json", "summary.json"):
        assert "failed" in (content := (run.directory / file).read_text()) and ending in content
    assert_nothing_left(run.directory)


def workers_of(run: int) -> list[int]:
    """The reward processes of a run."""
    found = []
    for process in psutil.Process(run).children(recursive=True):
        try:
            if "megarl.rewards.worker" in process.cmdline():
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_reward_workers_that_are_killed_and_stopped_cost_time_only(tmp_path: Path) -> None:
    """At random moments, mostly while they score: the sample of a killed one is scored again, of a stopped one lost."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    config = tiny_config(tmp_path, steps=6)
    config["reward"] = {"function": f"{MODULE}:slow_digit_share", "workers": 2, "timeout_s": 3.0}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    process = start(tmp_path / "config.yaml")
    run_dir, faults = Path(config["run"]["dir"]), 0
    deadline = time.monotonic() + 400
    with killed_after(process, run_dir):
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(moments.uniform(0.3, 1.5))
            if faults < 8 and step_records(run_dir) and (workers := workers_of(process.pid)):
                try:
                    os.kill(moments.choice(workers), signal.SIGSTOP if faults % 4 == 3 else signal.SIGKILL)
                except ProcessLookupError:
                    continue
                faults += 1
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-4000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    records = step_records(run_dir)
    assert faults >= 3 and len(records) == summary["steps"] == 6
    assert sum(each["reward/redone"] for each in records) > 0
    assert summary["reward_errors"] == sum(each["batch/failed_samples"] for each in records) <= faults
    for each in records:
        ends = [each[f"groups/{end}"] for end in ("trained", "filtered", "dropped_stale", "failed")]
        assert each["groups/admitted"] == sum(ends) == 4 and each["batch/samples"] == 16
    assert_nothing_left(run_dir)
