"""Whole runs of a model that sees: engine and trainer are shown the same pixels, at the same places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_vision import make_tiny_vision, picture
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


def check(run: Run, tree: dict[str, Any]) -> None:
    assert run.code == 0, run.output[-4000:]
    assert [record["step"] for record in run.metrics] == list(range(1, tree["run"]["steps"] + 1))
    for record in run.metrics:
        assert record["policy/grad_norm"] > 0
        assert record["mismatch/logprob_abs_diff_mean"] <= ON_POLICY_MEAN
        assert record["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX
    assert run.summary["eval_after"]["n"] == 12
