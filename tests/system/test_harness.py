"""A whole run whose samples a harness makes in agent workers: what the gateway has recorded is what is trained."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megarl.environments.session_rows import read_turns, session_rows
from megarl.queue.dump import read_batch
from megarl.rollout.agents.loop_run import EVAL_SEED_OFFSET
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import tiny_config, train

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MEAN, MAX, STEPS = 1e-5, 1e-4, 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_the_sessions_of_a_harness_are_trained(tmp_path: Path) -> None:
    """The harness branches, so each sample has two rows; it asks for temperature 0, and the run's sampling holds.

    Two agent workers call it, for training and for evaluations.
    """
    config = tiny_config(tmp_path, steps=STEPS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    kept = tmp_path / "sessions"
    kept.mkdir()
    config["agent"] = {"loop": "harness", "act": "tests.support.gateway.acts:two_turns", "kwargs": {"keep": str(kept)}}
    config["agent"]["act_timeout_s"] = 150
    config["gateway"] = {"enabled": True}
    config["rollout"]["agent_workers"] = 2
    config["sampling"]["max_tokens"] = 64
    config["trainer"]["micro_batch_tokens"] = 1024
    run = train(config, "telemetry.dump_batches=true")
    assert run.code == 0, run.output[-4000:]
    samples = config["batch"]["groups"] * config["batch"]["samples_per_group"]
    for record in run.metrics:
        assert record["mismatch/logprob_abs_diff_mean"] <= MEAN and record["mismatch/logprob_abs_diff_max"] <= MAX
        assert record["mismatch/tokens"] == record["batch/loss_tokens"] < record["batch/response_tokens"]
        assert record["batch/samples"] == samples and record["agent/turns_mean"] == 3
        assert (record["rollout/workers_alive"], record["rollout/workers_lost"]) == (2, 0)
    for step in range(STEPS):
        check_rows(read_batch(run.directory / "batches", step).trajectories, kept, step)
    check_processes(run.directory, kept, STEPS * samples)
    assert_nothing_left(run.directory)


def check_processes(directory: Path, kept: Path, trained: int) -> None:
    """The workers have acted for every sample and for every response of an evaluation, and the controller for none."""
    sessions = {file: json.loads(file.read_text()) for file in kept.iterdir()}
    assert {each["process"].split(".")[0] for each in sessions.values()} == {"ray::AgentWorker"}
    evaluated = [file for file in sessions if int(file.name.split("-")[1]) >= EVAL_SEED_OFFSET]
    records = [json.loads(line) for file in directory.glob("eval_*.jsonl") for line in file.read_text().splitlines()]
    assert len(evaluated) == len(records) > 0 and len(sessions) >= len(evaluated) + trained
    greedy = [record for record in records if record["mode"] == "greedy"]
    assert greedy and all(record["response_tokens"] and not record["error"] for record in greedy)


def check_rows(rows: list, kept: Path, step: int) -> None:
    """The rows of each sample are those of its session, as `GET /v1/sessions/ID` returned it."""
    by_sample: dict[tuple[int, int], list] = {}
    for row in rows:
        by_sample.setdefault((row.group_id, row.sample_index), []).append(row)
    for (group, index), own in by_sample.items():
        [file] = kept.glob(f"megarl-{group}-{index}-*.json")
        content = json.loads(file.read_text())
        made = session_rows(read_turns(content))
        assert [row.part for row in own] == [0, 1] and len(made) == 2 and content["row"]
        for row, expected in zip(own, made, strict=True):
            assert (row.prompt_ids, row.response_ids) == (expected.prompt_ids, expected.response_ids)
            assert (row.rollout_logprobs, row.response_mask) == (expected.logprobs, expected.mask)
            assert row.versions == expected.versions and row.status == "ok"
            assert {span.version for span in row.versions} == {step}
