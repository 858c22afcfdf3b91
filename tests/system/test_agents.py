"""Whole runs of agents: what tools have said passes through queue and trainer, and is never trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megarl.queue.dump import read_batch
from tests.support.chat_templates import CHATML_TOOLS
from tests.support.leftovers import assert_nothing_left
from tests.support.run import tiny_config, train

pytestmark = pytest.mark.engine

MEAN, MAX = 1e-5, 1e-4


def test_a_loop_and_a_tool_of_ones_own(tmp_path: Path) -> None:
    """The examples of docs/environments.md, on a random model, with the engine's log-probs against the trainer's."""
    config = tiny_config(tmp_path, steps=2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = CHATML_TOOLS.replace("{{ tools | tojson }}", "{{ tools[0]['function']['name'] }}")
    tokenizer.save_pretrained(tmp_path / "model")
    config["agent"] = {
        "loop": "examples.rl.agents.second_thoughts:SecondThoughts",
        "kwargs": {"tool": "digits", "first_tokens": 8},
        "tool_format": "hermes",
    }
    config["tools"] = [{"kind": "examples.rl.agents.digits:Digits"}]
    config["sampling"]["max_tokens"] = 128
    config["trainer"]["micro_batch_tokens"] = 1024
    run = train(config, "telemetry.dump_batches=true")
    assert run.code == 0, run.output[-4000:]
    for record in run.metrics:
        assert record["mismatch/logprob_abs_diff_mean"] <= MEAN and record["mismatch/logprob_abs_diff_max"] <= MAX
        assert record["mismatch/tokens"] == record["batch/loss_tokens"] < record["batch/response_tokens"]
        assert record["agent/turns_mean"] == 2 and record["agent/tool_calls_mean"] == 1
        assert record["agent/tool_errors"] == 0
    for step in range(2):
        batch = read_batch(run.directory / "batches", step)
        for row in batch.trajectories:
            inserted = [token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if not mask]
            assert "digits. Answer again." in tokenizer.decode(inserted)
            text = tokenizer.decode([*row.prompt_ids, *row.response_ids])
            assert text.startswith("<|im_start|>system\ndigits<|im_end|>") and text.count("<|im_start|>assistant") == 2
    check_files(run.directory)
    assert_nothing_left(run.directory)


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
