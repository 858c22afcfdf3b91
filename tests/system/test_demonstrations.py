"""Whole runs that learn from demonstrations first: no engine generates for them, and each group counts once."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.queue.dump import read_batch
from tests.support.runs.run import Run, tiny_config, train
from tests.support.runs.whole_runs import check_every_group_once

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WARM_UP, STEPS = 12, 14


def warmed_up(directory: Path, steps: int = STEPS) -> dict[str, Any]:
    """A random model that sees answers of digits in the first steps, and then answers for shuffled rewards."""
    config = tiny_config(directory, steps=steps)
    problems = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    shown = [{"problem": row["problem"], "reply": row["answer"] * 2} for row in problems]
    (directory / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    config["data"] = {
        "sets": [
            {"name": "shown", "path": str(directory / "shown.jsonl"), "demonstration_field": "reply",
             "until_step": WARM_UP},
            {"name": "asked", "path": str(directory / "train.jsonl"), "from_step": WARM_UP},
        ]
    }  # fmt: skip
    config["trainer"]["optimizer"] = {"lr": 3e-3}
    config["algorithm"] = {"permute_rewards": True}  # the rewards teach nothing
    config["checkpoint"] = {"every": 5}
    config["telemetry"] = {"dump_batches": True}
    return config


def test_a_warm_up_teaches_and_a_resume_goes_on_in_it(tmp_path: Path) -> None:
    """The first start ends in the warm-up, the second one goes on with the demonstrations that come next."""
    config = warmed_up(tmp_path)
    first = train(config, "run.steps=5")
    assert first.code == 0, first.output[-4000:]
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    check_every_group_once(run, STEPS)
    records = run.metrics
    learnt = [record["policy/ce"] for record in records if "policy/ce" in record]
    assert len(learnt) == WARM_UP and learnt[-1] < 0.5 * learnt[0], learnt
    samples = config["batch"]["groups"] * config["batch"]["samples_per_group"]
    assert [record["batch/demonstrations"] for record in records] == [samples] * WARM_UP + [0] * (STEPS - WARM_UP)
    assert ["reward/mean" in record for record in records] == [False] * WARM_UP + [True] * (STEPS - WARM_UP)
    check_batches(run, samples)
    summary = run.summary
    assert summary["eval_after"]["greedy"] > summary["eval_before"]["greedy"] + 0.3, summary


def check_batches(run: Run, samples: int) -> None:
    """Every demonstration comes before one comes again, and its tokens are those of no engine."""
    prompts = []
    for step in range(STEPS):
        rows = read_batch(run.directory / "batches", step).trajectories
        assert {row.demonstrated for row in rows} == {step < WARM_UP}
        if step < WARM_UP:
            assert len(rows) == samples and not any(row.versions for row in rows)
            prompts += [tuple(row.prompt_ids) for row in rows]
    distinct = len(set(prompts))
    for start in range(0, len(prompts) - distinct + 1, distinct):
        assert len(set(prompts[start : start + distinct])) == distinct


def test_without_the_demonstrations_as_many_steps_teach_less(tmp_path: Path) -> None:
    config = warmed_up(tmp_path)
    config["data"] = {"path": str(tmp_path / "train.jsonl")}
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    summary = run.summary
    assert summary["eval_after"]["greedy"] < summary["eval_before"]["greedy"] + 0.3, summary
