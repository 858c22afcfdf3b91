"""A verifiers environment is trained end to end: its server, the gateway, engines and trainer are the real ones."""

import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.queue.dump import read_batch
from tests.support.gateway.verifiers_play import EXAMPLES, VARIABLE, exported, needs_verifiers, shipped
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, tiny_config, train

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS, LAST = 20, 4
LATER = 10  # steps after which a batch is sampled again
MEAN, MAX = 1e-5, 1e-4
pytestmark = [
    pytest.mark.engine,
    needs_verifiers,
]
LETTERS = "etaoinshrdlc"


def give_template(model: Path) -> None:
    """Let the model's tokenizer write each message as it is."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)


def config_of(directory: Path, steps: int, **kwargs: Any) -> dict[str, Any]:
    """The config of docs/rollout/environments.md on a random model, with exported tasks. `kwargs`: of the loop."""
    config = tiny_config(directory, steps=steps)
    give_template(directory / "model")
    for name, skip, count in (("train", 0, 48), ("heldout", 48, 8)):
        exported(directory, "digits_tasks", count, skip=skip, name=name)
    config["gateway"] = {"enabled": True}
    config["agent"] = {
        "loop": "megarl.environments.verifiers_loop:Verifiers",
        "kwargs": {"taskset": "digits_tasks", "python": os.environ[VARIABLE], "paths": [str(EXAMPLES)], **kwargs},
    }
    config["agent"]["kwargs"]["timeout_s"] = 0.9 * config["timeouts"]["generate_s"]
    config["trainer"]["optimizer"]["lr"] = 5e-3
    config["trainer"]["micro_batch_tokens"] = 1024
    config["batch"] = {"groups": 4, "samples_per_group": 8}
    return config


def run_of(directory: Path, steps: int, *overrides: str, **kwargs: Any) -> Run:
    """A run of its own, up to a number of steps."""
    directory.mkdir()
    run = train(config_of(directory, steps, **kwargs), "telemetry.dump_batches=true", *overrides, timeout=600.0)
    assert run.code == 0, run.output[-4000:]
    assert_nothing_left(run.directory)
    return run


def check_agreement(records: list[dict[str, Any]]) -> None:
    """Every sample is one turn, and engine and trainer agree on its tokens."""
    for record in records:
        assert record["batch/failed_samples"] == 0 and record["agent/turns_mean"] == 1
        assert record["reward/component/digits"] == pytest.approx(record["reward/mean"])
        if record["groups/trained"]:  # else the rewards of each group are equal
            assert record["mismatch/logprob_abs_diff_mean"] <= MEAN and record["mismatch/logprob_abs_diff_max"] <= MAX


def check_same_tokens(one: Run, other: Run, step: int) -> None:
    """The batches of a step are equal, token for token, and of the weights of that step."""
    batches = [read_batch(run.directory / "batches", step).trajectories for run in (one, other)]
    for first, again in zip(*batches, strict=True):
        assert (first.key, first.prompt_ids, first.response_ids) == (again.key, again.prompt_ids, again.response_ids)
        assert (first.response_mask, first.versions, first.reward) == (
            again.response_mask,
            again.versions,
            again.reward,
        )
        assert first.reward == again.reward
        assert first.rollout_logprobs == pytest.approx(again.rollout_logprobs, abs=MEAN)
        assert {span.version for span in first.versions} == {step}


def test_the_reward_rises_and_other_runs_sample_the_same_tokens(tmp_path: Path) -> None:
    """Another run from the start samples the first batch, and one from a checkpoint that of the trained weights."""
    first = run_of(tmp_path / "first", STEPS, f"checkpoint.every={LATER}")
    rewards = [record["reward/mean"] for record in first.metrics]
    assert sum(record["groups/trained"] > 0 for record in first.metrics) >= LAST, rewards
    check_agreement(first.metrics)
    before, after = statistics.fmean(rewards[:LAST]), statistics.fmean(rewards[-LAST:])
    assert after > before + 0.15, rewards
    check_same_tokens(first, run_of(tmp_path / "again", 1), 0)
    checkpoint = CheckpointDirectory(first.directory / "checkpoints").path(LATER)
    check_same_tokens(first, run_of(tmp_path / "later", LATER + 1, f"checkpoint.resume={checkpoint}"), LATER)


def test_the_training_client_of_verifiers_acts_by_tokens(tmp_path: Path) -> None:
    """It makes the prompts itself, and the gateway passes on the tokens of both sides as they are."""
    renderer = {"renderer": str(tmp_path / "run" / "model"), "renderer_config": {"name": "default"}}
    run = run_of(tmp_path / "run", 2, client="train", **renderer)
    assert len(run.metrics) == 2
    check_agreement(run.metrics)
    for step in range(2):
        rows = read_batch(run.directory / "batches", step).trajectories
        assert all(row.status == "ok" and row.response_ids and all(row.response_mask) for row in rows)


def test_a_taskset_and_a_program_of_verifiers_are_trained_unchanged(tmp_path: Path) -> None:
    """verifiers' `echo_v1` rewards an answer that has the task's phrase, which is a letter here.

    A random model writes it now and then, so that rewards differ within groups.
    """
    phrases = {"phrases": list(LETTERS)}
    config = tiny_config(tmp_path, steps=2)
    give_template(tmp_path / "model")
    exported(tmp_path, "echo_v1", len(LETTERS), phrases, name="train")
    del config["evaluation"]
    config["gateway"] = {"enabled": True}
    kwargs = {"taskset": "echo_v1", "taskset_config": phrases, "environment": {"agent": {"harness": {"id": "null"}}}}
    kwargs |= {"python": os.environ[VARIABLE], "paths": [str(shipped())], "timeout_s": 500.0}
    config["agent"] = {"loop": "megarl.environments.verifiers_loop:Verifiers", "kwargs": kwargs}
    # Each sample starts a program, which takes long on a busy machine.
    config["timeouts"] |= {"generate_s": 600, "engine_start_s": 900}
    config["trainer"]["micro_batch_tokens"] = 1024
    config["batch"] = {"groups": 2, "samples_per_group": 4}
    run = train(config, "telemetry.dump_batches=true", timeout=1500.0)
    assert run.code == 0, run.output[-4000:]
    assert_nothing_left(run.directory)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for step, record in enumerate(run.metrics):
        rows = read_batch(run.directory / "batches", step).trajectories
        assert len(rows) == 8 and record["batch/failed_samples"] == 0 and record["agent/turns_mean"] == 1
        for row in rows:
            letter = tokenizer.decode(row.prompt_ids).rpartition("exact phrase: ")[2][0]
            assert row.reward == float(
                letter in tokenizer.decode(row.response_ids, skip_special_tokens=True).casefold()
            )
            assert row.reward_components == {"echoed": row.reward} and all(row.response_mask) and row.response_ids
            assert {span.version for span in row.versions} == {step}
        assert record["reward/mean"] == pytest.approx(statistics.fmean(row.reward for row in rows))
        if record["groups/trained"]:
            assert record["mismatch/logprob_abs_diff_mean"] <= MEAN and record["mismatch/logprob_abs_diff_max"] <= MAX
    assert [record["time/step"] > 0 for record in run.metrics] == [True, True]
