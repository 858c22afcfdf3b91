"""Whole runs of a model that sees: engine and trainer are shown the same pixels, at the same places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.queue.dump import read_batch
from tests.support.models.tiny_vision import TEMPLATE, make_tiny_vision, picture
from tests.support.runs.run import ON_POLICY_MAX, ON_POLICY_MEAN, Run, tiny_config, train
from tests.support.trainer.configs import with_changes

pytestmark = pytest.mark.engine
SIZES = [(90, 60), (130, 170), (60, 200), (100, 100)]


def seeing(directory: Path, family: str = "qwen2_5_vl", **changes: Any) -> dict[str, Any]:
    """A config whose rows have one image, two of different size, or none."""
    tree = tiny_config(directory)
    make_tiny_vision(directory / "seeing", family)
    for number, size in enumerate(SIZES):
        (directory / f"{number}.png").write_bytes(picture(*size, seed=number))
    for name, first in (("train", 3), ("heldout", 20)):
        rows = []
        for number in range(first, first + 12):
            images = [f"{each % len(SIZES)}.png" for each in range(number, number + number % 3)]
            marks = "<image>" * len(images)
            rows.append({"images": images, "problem": f"{marks}What is {number} + 2?", "answer": str(number + 2)})
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "model__path": str(directory / "seeing"), "model__vision": {"max_pixels": 50176, "images_per_prompt": 2},
        "data__images_field": "images", "data__max_prompt_tokens": 240, "trainer__micro_batch_tokens": 600,
    }  # fmt: skip
    return with_changes(tree, own | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model__vision__train": "all", "rollout__agent_workers": 1, "run__steps": 3}, id="dp2-all"),
        pytest.param({"family": "qwen3_vl", "run__steps": 2}, id="qwen3"),
        pytest.param({"family": "qwen3_vl_moe", "run__steps": 1}, id="qwen3-moe"),
        pytest.param({"trainer__parallel": {"pipeline": 2}, "run__steps": 2}, id="pp2"),
    ],
)  # fmt: skip
def test_engine_and_trainer_see_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    tree = seeing(tmp_path, **changes)
    check(train(tree), tree)


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    tree = seeing(tmp_path, trainer__parallel={"tensor": 2, "sequence": True}, run__steps=3, checkpoint__every=2)
    begun = train(tree, "run.steps=2")
    assert begun.code == 0, begun.output[-4000:]
    resumed = train(tree)
    assert "2 steps done" in resumed.output
    check(resumed, tree)


TOOLS = "{% if tools %}<|im_start|>system\n{{ tools[0]['function']['name'] }}<|im_end|>\n{% endif %}"


def drawing(directory: Path, **changes: Any) -> dict[str, Any]:
    """A config in which a tool answers with two pictures in each sample."""
    own: dict[str, Any] = {
        "agent": {"loop": "tests.support.rollout.picture_agents:Looks", "tool_format": "hermes"},
        "tools": [{"kind": "tests.support.rollout.picture_agents:Draw"}],
        "sampling__max_tokens": 128, "trainer__micro_batch_tokens": 1200, "model__vision__images_per_prompt": 4,
    }  # fmt: skip
    tree = seeing(directory, **own | changes)
    (directory / "seeing" / "chat_template.jinja").write_text(TOOLS + TEMPLATE)
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_tools_answer_with_pictures(tmp_path: Path, workers: int) -> None:
    """The tool of a class draws two in each sample, next to those of the prompt."""
    tree = drawing(tmp_path, rollout__agent_workers=workers, run__steps=2, model__vision__train="all")
    run = train(tree, "telemetry.dump_batches=true")
    check(run, tree)
    rows = [row for step in range(2) for row in read_batch(run.directory / "batches", step).trajectories]
    hashes = [row.images[-2].hash for row in rows]
    assert len(set(hashes)) == len(rows)  # of each sample's own picture
    assert len({row.images[-1].hash for row in rows}) == 1
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        for image in row.images[-2:]:
            assert image.offset > len(row.prompt_ids) and len(set(ids[image.offset : image.end])) == 1
            assert not any(row.response_mask[image.offset - len(row.prompt_ids) : image.end - len(row.prompt_ids)])


@pytest.mark.slow
def test_a_harness_shows_pictures(tmp_path: Path) -> None:
    """Two turns through the gateway, each with a picture of the sample's own; what its session has is trained."""
    changes: dict[str, Any] = {
        "agent": {"loop": "harness", "act": "tests.support.gateway.acts:shows_pictures", "act_timeout_s": 150},
        "data__images_field": None,
        "gateway": {"enabled": True}, "rollout__agent_workers": 1, "sampling__max_tokens": 128,
        "trainer__micro_batch_tokens": 1200, "run__steps": 2,
    }  # fmt: skip
    tree = seeing(tmp_path, **changes)
    for name in ("train", "heldout"):
        texts = [{"problem": f"What is {number} + 2?", "answer": str(number + 2)} for number in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    run = train(tree, "telemetry.dump_batches=true")
    check(run, tree)
    rows = [row for step in range(2) for row in read_batch(run.directory / "batches", step).trajectories]
    for row in rows:
        first, second = row.images
        assert first.end <= len(row.prompt_ids) < second.offset and first.hash != second.hash


def check(run: Run, tree: dict[str, Any]) -> None:
    assert run.code == 0, run.output[-4000:]
    check_agreement(run, tree["run"]["steps"])
    assert run.summary["eval_after"]["n"] == 12


def check_agreement(run: Run, steps: int) -> None:
    """Engine and trainer agree in every step."""
    assert [record["step"] for record in run.metrics] == list(range(1, steps + 1))
    for record in run.metrics:
        assert record["policy/grad_norm"] > 0
        assert record["mismatch/logprob_abs_diff_mean"] <= ON_POLICY_MEAN
        assert record["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX
