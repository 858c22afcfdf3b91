"""A run whose time is over in its last evaluation, of whose samples some have no reward."""

import json
from pathlib import Path

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.common.rundir.run_files import ask_to_stop, read_exit
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, tiny_config, train
from tests.support.runs.whole_runs import killed_after, metric_steps, start_run, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FUNCTIONS = "tests.support.rewards.reward_functions"


def test_a_time_limit_in_the_final_evaluation_loses_nothing(tmp_path: Path) -> None:
    """The stop request of a time limit comes while the trained policy is evaluated: saved first, resumed into it.

    The reward function fails for about half of the samples, which are counted and not trained.
    """
    mark, slow, steps = tmp_path / "mark", tmp_path / "slow", 2
    config = tiny_config(tmp_path, steps=steps)
    config["trainer"]["gpus"] = 1
    config["reward"] = {"function": f"{FUNCTIONS}:fails_on_even", "max_error_share": 1.0, "workers": 1}
    [heldout] = config["evaluation"]["sets"]
    reward = {
        "function": f"{FUNCTIONS}:slow_and_marked", "kwargs": {"mark": str(mark), "slow": str(slow), "seconds": 1.0},
    }  # fmt: skip
    config["evaluation"]["sets"].append({**heldout, "name": "slow", "reward": reward})
    config["telemetry"] = {"samples_per_step": 16}
    run_dir, process = tmp_path / "run", start_run(config, ranks=1)
    with killed_after(process, run_dir):
        wait_for(lambda: metric_steps(run_dir) >= 1, process)
        slow.touch()
        mark.unlink()
        wait_for(lambda: metric_steps(run_dir) == steps and mark.exists(), process)
        ask_to_stop(run_dir, "the time limit")
        output, _ = process.communicate(timeout=600)
    stopped = Run(process.returncode, output, run_dir)
    assert stopped.code == 0 and "the evaluation (after) was ended by a stop request" in output, output[-4000:]
    record = read_exit(run_dir)
    assert record is not None and (record.status, record.step) == ("preempted", steps)
    assert stopped.summary["eval_after"] is None
    assert CheckpointDirectory(run_dir / "checkpoints").steps() == [steps]
    check_samples_without_a_reward(stopped)
    trained = stopped.metrics
    slow.unlink()
    resumed = train(config, ranks=1)
    assert resumed.code == 0 and f"{steps} steps done" in resumed.output, resumed.output[-4000:]
    assert resumed.metrics == trained, "a step was made again"
    assert resumed.summary["exit"] == "finished" and resumed.summary["eval_after"]["n"] == 8
    assert resumed.summary["eval_before"] == stopped.summary["eval_before"]
    reports = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in reports if "eval/version" in line] == [0, 0, steps, steps], "of two sets each"
    assert_nothing_left(run_dir)


def check_samples_without_a_reward(run: Run) -> None:
    lines = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["reward_error"]]
    assert 0 < len(failed) < len(lines) == 32
    for line in lines:
        assert (line["status"] == "failed") == bool(line["reward_error"]) == (line["failure"] != "")
        assert not line["reward_error"] or "LookupError: no verdict on an even length" in line["reward_error"]
    assert run.summary["reward_errors"] == len(failed) == sum(each["reward/errors"] for each in run.metrics)
    assert sum(each["batch/failed_samples"] for each in run.metrics) == len(failed)
    assert sum(each["batch/trained_samples"] for each in run.metrics) <= len(lines) - len(failed)
    assert run.summary["eval_before"]["reward_errors"] > 0
    assert "rewards failed; the first: reward function" in run.output
    assert run.output.count("exception no. 1: LookupError: no verdict") == 1
