"""A verifiers environment is trained end to end: its server, the door, engines and trainer are the real ones."""

from __future__ import annotations

import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.queue.dump import read_batch
from tests.support.checkout import ROOT
from tests.support.leftovers import assert_nothing_left
from tests.support.run import Run, tiny_config, train

VARIABLE = "MEGARL_VERIFIERS_PYTHON"
EXAMPLES = ROOT / "examples/rl/environments"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS, LAST = 20, 4
MEAN, MAX = 1e-5, 1e-4
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with verifiers 0.4.0"),
]


def config_of(directory: Path, steps: int) -> dict[str, Any]:
    """The config of docs/environments.md on a random model, with tasks from the exporter."""
    config = tiny_config(directory, steps=steps)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "model")
    for name, skip, count in (("train", 0, 48), ("heldout", 48, 8)):
        command = [os.environ[VARIABLE], str(EXAMPLES / "export_tasks.py"), "digits_tasks"]
        command += ["--skip", str(skip), "--count", str(count), "--out", str(directory / f"{name}.jsonl")]
        subprocess.run(command, check=True, timeout=300)
    config["door"] = {"enabled": True}
    config["agent"] = {
        "loop": "megarl.environments.verifiers_loop:Verifiers",
        "kwargs": {"taskset": "digits_tasks", "python": os.environ[VARIABLE], "paths": [str(EXAMPLES)]},
    }
    config["trainer"]["optimizer"]["lr"] = 5e-3
    config["trainer"]["micro_batch_tokens"] = 1024
    config["batch"] = {"groups": 4, "samples_per_group": 8}
    return config


def run_of(directory: Path, steps: int) -> Run:
    directory.mkdir()
    run = train(config_of(directory, steps), "telemetry.dump_batches=true", timeout=600.0)
    assert run.code == 0, run.output[-4000:]
    assert_nothing_left(run.directory)
    return run


def test_the_reward_rises_and_another_run_samples_the_same_tokens(tmp_path: Path) -> None:
    first, again = run_of(tmp_path / "first", STEPS), run_of(tmp_path / "again", 1)
    rewards = [record["reward/mean"] for record in first.metrics]
    learning = [record for record in first.metrics if record["groups/trained"]]
    assert len(learning) >= LAST, rewards
    for record in first.metrics:
        assert record["batch/failed_samples"] == 0 and record["agent/turns_mean"] == 1
        assert record["reward/component/digits"] == pytest.approx(record["reward/mean"])
    for record in learning:  # not those in which the rewards of each group are equal
        assert record["mismatch/logprob_abs_diff_mean"] <= MEAN and record["mismatch/logprob_abs_diff_max"] <= MAX
    before, after = statistics.fmean(rewards[:LAST]), statistics.fmean(rewards[-LAST:])
    assert after > before + 0.15, rewards
    batches = [read_batch(run.directory / "batches", 0).trajectories for run in (first, again)]
    for one, other in zip(*batches, strict=True):
        assert (one.key, one.prompt_ids, one.response_ids) == (other.key, other.prompt_ids, other.response_ids)
        assert (one.response_mask, one.versions, one.reward) == (other.response_mask, other.versions, other.reward)
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=MEAN)
