"""The checkpoint from which a run goes on, and what it must have in common with the run."""

import json
import shutil
from pathlib import Path

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.checkpoint.save.resume import (
    Candidate,
    ResumeError,
    candidates,
    changed_order,
    changes,
    choose,
    contradictions,
    identity,
    resume_problems,
)
from megarl.models.hf.read_config import load_info
from tests.support.checkpoints.sample_checkpoints import make_checkpoint, verify
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import config, write_problems


def test_the_newest_sound_checkpoint_is_taken_and_the_damaged_one_named(directory: CheckpointDirectory) -> None:
    for step in (2, 4, 6):
        make_checkpoint(directory, step)
    (directory.path(6) / "shard").write_bytes(b"other!!")
    damaged: list[tuple[int, str]] = []
    chosen = choose(candidates(directory, "auto"), verify, lambda c, problems: damaged.append((c.step, problems[0])))
    assert chosen == Candidate(directory.path(4), 4, True)
    [(step, problem)] = damaged
    assert step == 6 and str(directory.path(6) / "shard") in problem


def test_nothing_sound_is_an_error_and_nothing_at_all_a_new_run(directory: CheckpointDirectory) -> None:
    def set_aside(candidate: Candidate, problems: list[str]) -> None:
        directory.set_aside(candidate.step, "damaged")

    assert choose(candidates(directory, "auto"), verify, set_aside) is None
    make_checkpoint(directory, 2)
    assert choose(candidates(directory, "never"), verify, set_aside) is None
    (directory.path(2) / "shard").unlink()
    for _ in range(2):  # torchrun starts the ranks again: the loss must not be hidden then either
        with pytest.raises(ResumeError, match=r"shard.*checkpoint.resume=never"):
            choose(candidates(directory, "auto"), verify, set_aside)


def test_a_path_may_be_a_checkpoint_or_a_directory_of_them(directory: CheckpointDirectory, tmp_path: Path) -> None:
    for step in (2, 4):
        make_checkpoint(directory, step)
    shutil.copytree(directory.root, tmp_path / "copy")
    assert candidates(directory, str(directory.path(2))) == [Candidate(directory.path(2), 2, True)]
    [found] = candidates(directory, str(tmp_path / "copy"))
    assert (found.step, found.own) == (4, False)
    with pytest.raises(ResumeError, match="never completed"):
        candidates(directory, str(tmp_path))
    aside = directory.set_aside(2, "rolled_back")
    with pytest.raises(ResumeError, match=r"iter_0000002.rolled_back was set aside and does not belong"):
        candidates(directory, str(aside))


def test_another_model_or_tokenizer_contradicts_and_the_rest_is_only_reported() -> None:
    saved = {"model": {"hidden": 64, "rope": [1.0]}, "tokenizer": "a", "prompts": "p"}
    assert contradictions(saved, json.loads(json.dumps(saved))) == []
    assert contradictions(saved, {**saved, "model": {"hidden": 64, "rope": (1.0,)}}) == []
    [problem] = contradictions(saved, {**saved, "model": {"hidden": 128, "rope": [1.0]}})
    assert "hidden is 128, the checkpoint has 64" in problem
    assert "tokenizer" in contradictions(saved, {**saved, "tokenizer": "b"})[0]
    assert "data.path" in contradictions(saved, {**saved, "prompts": "q"})[0]
    several = {**saved, "prompts": {"a": "p", "b": "q"}}
    assert contradictions(several, several) == []
    assert "content of b differs" in contradictions(several, {**saved, "prompts": {"a": "p", "b": "r"}})[0]
    assert "['a'], the checkpoint has ['a', 'b']" in contradictions(several, {**saved, "prompts": {"a": "p"}})[0]
    for one, other in ((saved, several), (several, saved)):
        assert "has data.sets, and the other data.path" in contradictions(one, other)[0]
    before = {"trainer": {"optimizer": {"lr": 1e-3}, "gpus": 2}, "checkpoint": {"resume": "auto"}}
    after = {"trainer": {"optimizer": {"lr": 5e-4}, "gpus": 2}, "checkpoint": {"resume": "x"}}
    assert changes(before, after) == ["trainer.optimizer.lr: 0.001 -> 0.0005"]


def test_of_another_model_few_differences_are_reported() -> None:
    saved = {"model": {"hidden": 64, "ffn": 96, "heads": 4, "raw": {"a": 1}}, "tokenizer": "a", "prompts": "p"}
    other = {**saved, "model": {"hidden": 128, "ffn": 192, "heads": 8, "raw": {"a": 2, "b": [0] * 500}}}
    [problem] = contradictions(saved, other)
    assert problem == (
        "model.path: another model: ffn is 192, the checkpoint has 96, heads is 8, the checkpoint has 4, and 1 more "
        "differ"
    )
    same_sizes = {**saved, "model": {**saved["model"], "raw": {"a": 2}}}
    assert contradictions(saved, same_sizes) == ["model.path: another model: its config.json has another a"]


def test_the_order_of_the_prompts_cannot_change() -> None:
    saved = {"run": {"seed": 0}, "data": {"shuffle": True}}
    assert changed_order(saved, saved) == changed_order({}, saved) == []
    present = {"run": {"seed": 3}, "data": {"shuffle": False}}
    assert changed_order(saved, present) == [
        "run.seed is 3, the checkpoint has 0: set run.seed=0",
        "data.shuffle is false, the checkpoint has true: set data.shuffle=true",
    ]


def test_a_resume_that_would_be_refused_is_known_before_anything_starts(tmp_path: Path) -> None:
    model, data = make_tiny_model(tmp_path / "model"), write_problems(tmp_path / "prompts.jsonl", 4)
    chosen, info = config(model, data, run__dir=str(tmp_path / "run")), load_info(model)
    assert resume_problems(chosen, info) == []
    path = make_checkpoint(CheckpointDirectory(chosen.checkpoint_dir), 2)
    assert resume_problems(chosen, info) == [], "a damaged record, of which the start tells"
    record = {"identity": identity(chosen, info), "config": chosen.model_dump(mode="json")}
    (path / "state.json").write_text(json.dumps(record))
    assert resume_problems(chosen, info) == []
    reseeded = chosen.model_copy(update={"run": chosen.run.model_copy(update={"seed": 3})})
    [problem] = resume_problems(reseeded, info)
    assert problem.startswith(f"checkpoint.resume: {path} belongs to another run: run.seed is 3, the checkpoint has 0")
    assert "checkpoint.resume=never" in problem and len(problem) < 500
    again = chosen.model_copy(update={"checkpoint": chosen.checkpoint.model_copy(update={"resume": "never"})})
    assert resume_problems(again, info) == []
