"""Every recipe's CPU-sized twin trains: the recipe's own file with other sizes (tests/support/runs/recipe_twins.py)."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

from megarl.algorithms.filters import overlong_penalty
from megarl.config.derived.logprob_passes import correction_of
from megarl.config.derived.staleness import pace_of
from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config
from megarl.queue.dump import read_batch
from megarl.telemetry.trace.files import read_events
from tests.support.models.calling_model import CALL, PRINTED
from tests.support.runs.recipe_twins import RECIPES, SAMPLES, twin, write_model_and_data
from tests.support.runs.run import Run, train
from tests.support.runs.whole_runs import check_every_group_once

pytestmark = pytest.mark.engine

IN_CI = "qwen2_5_7b_retool_4x4"  # the one with tools, which also generates ahead


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.sandbox if each == IN_CI else pytest.mark.slow) for each in RECIPES]
)
def test_twin_trains(name: str, tmp_path: Path) -> None:
    tree = twin(name, tmp_path)
    config = config_from_tree(tree)
    write_model_and_data(name, tmp_path)
    run = train(tree, "telemetry.dump_batches=true", ranks=config.trainer.gpus)
    assert run.code == 0, run.output[-4000:]
    check_bound(run, config)
    check_publications(run, config)
    check_losses(run, config)
    check_every_group_once(run, config.run.steps, config.batch.groups, SAMPLES)
    if config.admission.refill:
        check_refilled(run, config)
    if config.tools:
        check_calls(run, config)


def check_bound(run: Run, config: Config) -> None:
    """Groups were generated ahead if the recipe does so, and no token is older than it allows."""
    pace, lags = pace_of(config), []
    for step, record in enumerate(run.metrics):
        batch = read_batch(run.directory / "batches", step)
        assert batch.version == step * pace.updates_per_step
        newest = batch.version + pace.updates_per_step - 1  # the weights that its last update begins with
        lags += [newest - row.oldest_version for row in batch.trajectories]
        assert record["batch/staleness_max"] <= pace.max_staleness
        assert all(span.version % pace.sync_interval == 0 for row in batch.trajectories for span in row.versions)
    assert max(lags) <= pace.max_staleness and (max(lags) >= pace.sync_interval) is pace.runs_ahead


def check_calls(run: Run, config: Config) -> None:
    """Tools were called in every step, in the sandbox, and the model went on from their answers, which are masked.

    The pool runs ahead of the trainer, so not every step has a group that ended since the one before.
    """
    calls = [record["agent/tool_calls_mean"] for record in run.metrics if "agent/tool_calls_mean" in record]
    assert calls and all(0 < each < config.agent.max_turns for each in calls)
    answered = 0
    for line in (run.directory / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        texts = [(part["by"], part["text"]) for part in sample.get("parts", ())]
        for (_, call), (by, answer) in pairwise(texts):
            if by == "environment" and CALL in call:
                assert re.search(rf"tool\s*{PRINTED}", answer), answer  # the tiny vocabulary may lack the line's end
                answered += 1
        if len(texts) > 1 and CALL in texts[0][1]:
            assert sample["reward_components"]["rounds"] >= 1 and sample["reward"] >= 0.1 - 1.0
    assert answered > 0
    tools = {(each.args["tool"], each.args["error"]) for each in read_events(run.directory, {"tool"})}
    assert (config.tools[0].name, 0) in tools
    for step, record in enumerate(run.metrics):
        rows = read_batch(run.directory / "batches", step).trajectories
        sampled = sum(sum(row.response_mask) for row in rows)
        assert sampled < sum(len(row.response_ids) for row in rows) == record["batch/response_tokens"]


def check_publications(run: Run, config: Config) -> None:
    pace = pace_of(config)
    published = [record["sync/version"] for record in run.metrics if "sync/version" in record]
    assert published == [
        (step + 1) * pace.updates_per_step for step in range(config.run.steps) if pace.publishes_after(step + 1)
    ]


def check_losses(run: Run, config: Config) -> None:
    """Every step updates the policy, by the recipe's loss: with its reference and its correction, or without."""
    for record in run.metrics:
        assert record["policy/updates"] == config.trainer.mini_batches
        assert math.isfinite(record["policy/loss"]) and record["policy/grad_norm"] > 0
        assert ("policy/kl_ref" in record) == (config.algorithm.kl.coef > 0)
        assert ("correction/weight_mean" in record) == (correction_of(config) is not None)
    # With one update per step a correction leaves the clip nothing to do; without, the ratio is to the engine's
    # log-probs, which older weights gave, or in a synchronous run the same. Later updates of a step have moved.
    ratio = max(record["policy/ratio_max"] for record in run.metrics)
    older = (correction_of(config) is None and pace_of(config).runs_ahead) or config.trainer.mini_batches > 1
    assert ratio > 1.0001 if older else ratio == pytest.approx(1.0, abs=1e-6 if correction_of(config) else 1e-3)


def check_refilled(run: Run, config: Config) -> None:
    """Every step trains its number of groups although about half of the problems have equal rewards."""
    limit, overlong = config.sampling.max_tokens, config.algorithm.overlong
    for step, record in enumerate(run.metrics):
        assert (
            record["groups/trained"] == config.batch.groups
            and record["groups/filtered"] == record["rollout/groups_replaced"]
        )
        rewards: dict[int, set[float]] = {}
        for row in read_batch(run.directory / "batches", step).trajectories:
            penalty = overlong_penalty(len(row.response_ids), limit, overlong.buffer_tokens, overlong.penalty)
            rewards.setdefault(row.group_id, set()).add(row.reward + penalty)
        assert len(rewards) == config.batch.groups and all(len(each) > 1 for each in rewards.values()), rewards
    last = run.metrics[-1]
    assert last["total/groups_admitted"] == len(run.metrics) * config.batch.groups + last["total/groups_filtered"]
    assert last["total/groups_filtered"] > 0, "nothing was replaced"
