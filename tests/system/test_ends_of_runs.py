"""Runs that lose something near their end, and say so: a step, every checkpoint, the last evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.common.run_files import ask_to_stop, read_exit
from megarl.queue.dump import read_batch
from tests.support.leftovers import assert_nothing_left
from tests.support.run import Run, tiny_config, train
from tests.support.whole_runs import kill_everything, metric_steps, start_run, wait_for

pytestmark = pytest.mark.engine

ENDS = ("trained", "filtered", "dropped_stale", "failed")
FUNCTIONS = "tests.support.reward_functions"


def one_rank(directory: Path, steps: int) -> dict[str, Any]:
    config = tiny_config(directory, steps=steps)
    config["trainer"]["gpus"] = 1
    return config


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_a_run_without_a_checkpoint_has_failed(
    tmp_path: Path,
) -> None:
    """One sample of one step has a reward that overflows; the place of the checkpoints is no directory."""
    mark, steps = tmp_path / "mark", 12
    config = one_rank(tmp_path, steps)
    config["reward"] = {"function": f"{FUNCTIONS}:overflowing_at", "kwargs": {"mark": str(mark)}}
    config["algorithm"], config["evaluation"] = {"advantage": "dr_grpo"}, {}
    config["checkpoint"] = {"every": 4, "dir": str(tmp_path / "disk")}
    config["telemetry"] = {"dump_batches": True}
    (tmp_path / "disk").write_text("not mounted")
    run_dir, process = tmp_path / "run", start_run(config, ranks=1)
    try:
        wait_for(lambda: metric_steps(run_dir) >= 1, process)
        mark.touch()
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            kill_everything(process, run_dir)
    run = Run(process.returncode, output, run_dir)
    check_skipped_step(run, steps)
    check_failed_saves(run, steps)
    assert_nothing_left(run_dir)


def check_skipped_step(run: Run, steps: int) -> None:
    """The groups of one step have failed and its batch is kept; the steps after it train."""
    records = run.metrics
    assert [record["step"] for record in records] == list(range(1, steps + 1)), run.output[-4000:]
    [skipped] = [record["step"] - 1 for record in records if record["groups/failed"]]
    assert skipped < steps - 1 and "the step is skipped (1 of at most 2)" in run.output
    rewards = [row.reward for row in read_batch(run.directory / "failed_batch", skipped).trajectories]
    assert len(rewards) == 16 and max(rewards) > 1e38
    seen: set[int] = set()
    for step, record in enumerate(records):
        groups = {row.group_id for row in read_batch(run.directory / "batches", step).trajectories}
        assert len(groups) == 4 and not groups & seen
        seen |= groups
        assert sum(record[f"groups/{end}"] for end in ENDS) == record["groups/admitted"] == 4
        if step == skipped:
            assert record["groups/trained"] == 0 and "policy/grad_norm" not in record
        else:
            assert record["groups/trained"] > 0 and math.isfinite(record["policy/grad_norm"])
            assert record["mismatch/logprob_abs_diff_max"] <= 1e-4
    assert records[-1]["total/groups_admitted"] == 4 * steps
    for end in ENDS:
        assert records[-1][f"total/groups_{end}"] == sum(record[f"groups/{end}"] for record in records)


def check_failed_saves(run: Run, steps: int) -> None:
    """The exit code, exit.json and summary.json say that no step is saved, and the terminal did at each save."""
    assert run.code != 0
    record = read_exit(run.directory)
    assert record is not None and (record.status, record.step) == ("failed", 0)
    assert f"all {steps} steps are trained, but the checkpoint of step {steps} could not be saved" in record.reason
    assert (run.summary["exit"], run.summary["failed_saves"]) == ("failed", 3)
    for step in (4, 8, 12):
        assert f"the checkpoint of step {step} could NOT be saved: " in run.output


def test_a_time_limit_in_the_final_evaluation_loses_nothing(tmp_path: Path) -> None:
    """The stop request of a time limit comes while the trained policy is evaluated: saved first, resumed into it."""
    mark, slow, steps = tmp_path / "mark", tmp_path / "slow", 2
    config = one_rank(tmp_path, steps)
    config["evaluation"]["sets"][0]["reward"] = {
        "function": f"{FUNCTIONS}:slow_and_marked", "kwargs": {"mark": str(mark), "slow": str(slow), "seconds": 1.0},
    }  # fmt: skip
    config["reward"] |= {"workers": 1}
    run_dir, process = tmp_path / "run", start_run(config, ranks=1)
    try:
        wait_for(lambda: metric_steps(run_dir) >= 1, process)
        slow.touch()
        mark.unlink()
        wait_for(lambda: metric_steps(run_dir) == steps and mark.exists(), process)
        ask_to_stop(run_dir, "the time limit")
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            kill_everything(process, run_dir)
    stopped = Run(process.returncode, output, run_dir)
    assert stopped.code == 0 and "the evaluation (after) was ended by a stop request" in output, output[-4000:]
    record = read_exit(run_dir)
    assert record is not None and (record.status, record.step) == ("preempted", steps)
    assert stopped.summary["eval_after"] is None
    assert CheckpointDirectory(run_dir / "checkpoints").steps() == [steps]
    trained = stopped.metrics
    slow.unlink()
    resumed = train(config, ranks=1)
    assert resumed.code == 0 and f"{steps} steps done" in resumed.output, resumed.output[-4000:]
    assert resumed.metrics == trained, "a step was made again"
    assert resumed.summary["exit"] == "finished" and resumed.summary["eval_after"]["n"] == 8
    assert resumed.summary["eval_before"] == stopped.summary["eval_before"]
    reports = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in reports if "eval/version" in line] == [0, steps]
    assert_nothing_left(run_dir)
