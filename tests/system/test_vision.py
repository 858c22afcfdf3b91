"""Whole runs of a model that sees: engine and trainer are shown the same pixels, at the same places."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.chaos import KINDS, Fault, Injector
from megarl.models.families import FAMILIES
from megarl.models.families.vision import frozen_tensors
from megarl.models.hf.read_config import load_info
from megarl.queue.dump import read_batch
from tests.support.models.tensors import differing, read_hf
from tests.support.models.tiny_vision import TEMPLATE, make_tiny_vision, picture
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import ON_POLICY_MAX, ON_POLICY_MEAN, Run, tiny_config, train
from tests.support.runs.whole_runs import (
    check_every_group_once,
    killed_after,
    metric_steps,
    replay,
    start_run,
    wait_for,
)
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
        pytest.param({"model__vision__train": "none", "run__steps": 2}, id="frozen"),
        pytest.param({"family": "qwen3_vl_moe", "run__steps": 1}, id="qwen3-moe"),
        pytest.param({"trainer__parallel": {"pipeline": 2}, "run__steps": 2}, id="pp2"),
        pytest.param({"family": "qwen3_vl", "trainer__parallel": {"context": 2}, "run__steps": 2}, id="cp2"),
    ],
)  # fmt: skip
def test_engine_and_trainer_see_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    tree = seeing(tmp_path, **changes)
    run = train(tree)
    check(run, tree)
    info = load_info(tree["model"]["path"])
    frozen = frozen_tensors(FAMILIES[info.family].vision(info), tree["model"]["vision"].get("train", "projector"))
    if any("layer-wise reload" in path.read_text() for path in (run.directory / "logs").glob("*.log")):
        frozen = ()
    sent = {name: value.nbytes for name, value in read_hf(run.directory / "hf").items() if name not in frozen}
    assert run.metrics[-1]["sync/bytes"] == sum(sent.values()), "a later publication has what can change, and only that"


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
    """The tool of a class draws two in each sample, next to those of the prompt. A replay trains on the same ones."""
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
    replay(run, tmp_path / "replayed", 2)
    assert differing(run.directory / "hf", tmp_path / "replayed" / "hf") == []


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


LOST = ("kill-engine", "kill-agent-worker", "kill-queue", "kill-controller", "kill-rank")


@pytest.mark.slow
def test_whatever_is_lost_engine_and_trainer_see_the_same(tmp_path: Path) -> None:
    """Responses go on on the other engine, files of images are in a new queue, loops go on from the journal.

    All samples of a step are of the trainer's weights, so a wrong image of one of them shows.
    """
    changes: dict[str, Any] = {
        "model__vision__train": "all", "trainer__optimizer__lr": 1e-4, "trainer__micro_batch_tokens": 1200,
        "sampling__max_tokens": 48, "run__steps": 2000, "checkpoint__every": 5, "telemetry": {"dump_batches": True},
        "rollout": {
            "max_num_seqs": 32, "replicas": 2, "agent_workers": 1, "report_interval_s": 0.1, "journal_s": 0.2,
        },
    }  # fmt: skip
    tree = seeing(tmp_path, **changes)
    run_dir, process = tmp_path / "run", start_run(tree, restarts=1)
    faults = [Fault(KINDS[name], 0, after_step=3, delay_s=0.5, seconds=0.0) for name in LOST]
    injector = Injector(run_dir, faults, replicas=2, say=print)
    with killed_after(process, run_dir):
        wait_for(lambda: injector.ended, process, timeout_s=1200)
        happened = injector.happened
        assert [each.over for each in happened] == [True] * len(LOST), [each.notes for each in happened]
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=600)
    assert injector.stop() == ""
    run, steps = Run(process.returncode, output, run_dir), metric_steps(run_dir)
    assert run.code == 0 and run.summary["exit"] == "preempted", output[-4000:]
    check_every_group_once(run, steps)
    check_agreement(run, steps)
    rows = [row for step in range(steps) for row in read_batch(run_dir / "batches", step).trajectories]
    assert {len(row.images) for row in rows} == {0, 1, 2}
    assert_nothing_left(run_dir)


def check(run: Run, tree: dict[str, Any]) -> None:
    assert run.code == 0, run.output[-4000:]
    check_agreement(run, tree["run"]["steps"])
    assert all(record["policy/grad_norm"] > 0 for record in run.metrics)
    assert run.summary["eval_after"]["n"] == 12


def check_agreement(run: Run, steps: int) -> None:
    """Engine and trainer agree in every step."""
    assert [record["step"] for record in run.metrics] == list(range(1, steps + 1))
    for record in run.metrics:
        assert record["mismatch/logprob_abs_diff_mean"] <= ON_POLICY_MEAN
        assert record["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX
