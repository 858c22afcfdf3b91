"""Whole runs of agents: what tools have said passes through queue and trainer, and is never trained on."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.tutorials.two_data_sets import make_data
from megarl.queue.dump import read_batch
from megarl.telemetry.trace.files import read_events
from tests.support.attacks.open_sockets import check_on_loopback
from tests.support.checkout import ROOT
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, second_thoughts
from tests.support.runs.whole_runs import (
    actors,
    check_every_group_once,
    killed_after,
    metric_steps,
    start_run,
    wait_for,
)

pytestmark = pytest.mark.engine

MEAN, MAX = 1e-5, 1e-4


def test_a_loop_a_tool_data_sets_and_rewards_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of docs/rollout.md, on a random model, with the engine's log-probs against the trainer's.

    The data sets, rewards and the function as a tool are those of the tutorials. Two agent workers run the loops.
    """
    config, tokenizer = second_thoughts(tmp_path, steps=2)
    of_tutorials(config, tmp_path, monkeypatch)
    config["rollout"]["agent_workers"], config["telemetry"] = 2, {"dump_batches": True}
    run_dir, process = tmp_path / "run", start_run(config)
    with killed_after(process, run_dir):
        wait_for((run_dir / "eval_before.jsonl").exists, process)  # the run is too short to wait for its first step
        check_on_loopback(run_dir, "ray::AgentWorker", "train_rl.py")
        output, _ = process.communicate(timeout=240)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0, run.output[-4000:]
    check_metrics(run)
    for record in run.metrics:
        assert [record[f"data/{name}/groups"] for name in ("plain", "carries", "short")] == [2, 1, 1]
        assert 0 <= record["data/carries/reward_mean"] <= 1
        # A random model boxes nothing, so that its reward is the price of its tokens.
        assert record["reward/component/boxed"] == 0 > record["data/short/reward_mean"]
    assert {record["agent/tool_calls_mean"] for record in run.metrics} == {1}
    for step in range(2):
        check_batch(run.directory, step, tokenizer)
    check_files(run.directory)
    tools = {each.args["tool"] for each in read_events(run.directory, {"tool"})}
    assert tools == {"digits"} and len(list(read_events(run.directory, {"turn"}))) == 2 * 2 * 16
    assert_nothing_left(run.directory)


def of_tutorials(config: dict[str, Any], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the two data sets, the rewards and the tool of the tutorials; the second set's rows are scored by both."""
    monkeypatch.setattr(make_data, "SOURCE", directory / "train.jsonl")
    monkeypatch.setattr(make_data, "OUT", directory)
    make_data.main()
    two, own, agent = (
        yaml.safe_load((ROOT / "examples/tutorials" / name / "config.yaml").read_text())
        for name in ("two_data_sets", "own_reward", "agent_with_a_tool")
    )
    plain, carries = ({**each, "path": str(directory / f"{each['name']}.jsonl")} for each in two["data"]["sets"])
    short = {**carries, "name": "short", "reward": own["reward"]}
    config["data"] = {"sets": [{**plain, "weight": 2}, {**carries, "weight": 1}, {**short, "weight": 1}]}
    config["tools"] += agent["tools"]


def check_metrics(run: Run) -> None:
    """Engine and trainer agree on the sampled tokens, which alone are trained on."""
    for record in run.metrics:
        assert record["mismatch/logprob_abs_diff_mean"] <= MEAN and record["mismatch/logprob_abs_diff_max"] <= MAX
        assert record["mismatch/tokens"] == record["batch/loss_tokens"] < record["batch/response_tokens"]
        assert record["agent/turns_mean"] == 2 and record["agent/tool_errors"] == 0


def check_batch(directory: Path, step: int, tokenizer: Any) -> list[str]:
    """Check the tokens of a step's batch; return its keys."""
    batch = read_batch(directory / "batches", step)
    for row in batch.trajectories:
        inserted = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if not mask]
        assert "digits. Answer again." in tokenizer.decode(inserted)
        text = tokenizer.decode([*row.prompt_ids, *row.response_ids])
        assert text.startswith("<|im_start|>system\ndigits<|im_end|>") and text.count("<|im_start|>assistant") == 2
    return [row.key for row in batch.trajectories]


@pytest.mark.slow
def test_a_worker_is_killed_at_a_random_moment_and_every_group_counts_once(tmp_path: Path) -> None:
    """Two agent workers; SIGKILL to one of them, drawn from a seed that is printed."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the kill: {seed}")
    rng = random.Random(seed)
    steps = 5
    config, tokenizer = second_thoughts(tmp_path, steps=steps)
    config["rollout"]["agent_workers"] = 2
    config["evaluation"], config["telemetry"] = {}, {"dump_batches": True}
    run_dir, process = tmp_path / "run", start_run(config)
    with killed_after(process, run_dir):
        step = rng.randrange(1, steps - 2)
        wait_for(lambda: metric_steps(run_dir) >= step, process)
        time.sleep(rng.uniform(0, 0.5))
        workers = actors(run_dir, "AgentWorker")
        assert len(workers) == 2 and {path.name for path in (run_dir / "logs").glob("worker-*.log")} == {
            "worker-0.log", "worker-1.log"
        }  # fmt: skip
        workers[rng.randrange(2)].kill()
        output, _ = process.communicate(timeout=240)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0, output[-4000:]
    check_metrics(run)
    assert sum(record["rollout/workers_lost"] for record in run.metrics) == 1
    # Calls that were answered before the kill are not made again, and were measured by the worker that is gone.
    assert all(record["agent/tool_calls_mean"] <= 1 for record in run.metrics)
    check_every_group_once(run, steps)
    keys = [key for step in range(steps) for key in check_batch(run_dir, step, tokenizer)]
    groups, samples = config["batch"]["groups"], config["batch"]["samples_per_group"]
    assert sorted(keys) == sorted(f"{group}:{index}" for group in range(steps * groups) for index in range(samples))
    writers = {(each.process, each.name) for each in read_events(run_dir, {"turn", "tool"})}
    assert writers >= {(f"worker-{index}", name) for index in range(2) for name in ("turn", "tool")}
    assert_nothing_left(run_dir)


def check_files(directory: Path) -> None:
    """Samples and evaluations show the turns to a reader."""
    for line in (directory / "samples.jsonl").read_text().splitlines():
        parts = json.loads(line)["parts"]
        assert [part["by"] for part in parts] == ["model", "environment", "model"]
        assert "digits. Answer again." in parts[1]["text"]
    records = [json.loads(line) for line in (directory / "eval_after.jsonl").read_text().splitlines()]
    assert {record["mode"] for record in records} == {"greedy", "sampled"}
    for record in records:
        roles = [turn["role"] for turn in record["turns"]]
        assert roles == ["assistant", "user", "assistant"] and "digits." in record["turns"][1]["text"]
        assert record["response"] and "digits." not in record["response"]
