"""Manifest, retention, leases, roll-back of result files and the choice of a checkpoint: exact, without processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.format.manifest import MANIFEST, DamagedCheckpointError, FileEntry, Manifest, check_files
from megarl.checkpoint.save.directory import CheckpointDirectory, best_step, goes_on, to_delete
from megarl.checkpoint.save.history import ROLLED_BACK, positions, roll_back
from megarl.checkpoint.save.resume import Candidate, ResumeError, candidates, changes, choose, contradictions
from megarl.common.processes import ProcessId
from tests.support.pool import pool_config
from tests.support.sample_checkpoints import make_checkpoint


def verify(path: Path) -> list[str]:
    try:
        manifest = Manifest.read(path)
    except DamagedCheckpointError as error:
        return [str(error)]
    return check_files(path, manifest.files, manifest.files)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints")


def test_only_what_has_a_manifest_is_a_checkpoint(directory: CheckpointDirectory) -> None:
    make_checkpoint(directory, 2)
    partial = directory.begin(4)
    (partial / "shard").write_bytes(b"half")
    assert directory.steps() == [2]
    (directory.root / "iter_0000006").mkdir()  # a rename without a manifest cannot happen, a copy can
    assert directory.steps() == [2]
    assert (directory.root / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    directory.begin(8)
    assert not partial.exists()


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing", "manifest"])
def test_damage_is_found_and_its_file_named(directory: CheckpointDirectory, damage: str) -> None:
    path = make_checkpoint(directory, 2, bytes(range(256)) * 100)
    assert verify(path) == []
    target = path / (MANIFEST if damage == "manifest" else "shard")
    content = bytearray(target.read_bytes())
    if damage == "flipped":
        content[12345] ^= 1
        target.write_bytes(content)
    elif damage == "missing":
        target.unlink()
    else:
        target.write_bytes(content[:-10])
    [problem] = verify(path)
    assert str(target) in problem


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_every_file_is_verified_by_exactly_one_rank(sizes: dict[str, int], ranks: int) -> None:
    manifest = Manifest(1, {name: FileEntry(size, "") for name, size in sizes.items()})
    shares = [manifest.share(rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


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
    with pytest.raises(ResumeError, match=r"iter_0000002.rolled_back is not of this run's history any more"):
        candidates(directory, str(aside))


def test_goes_on_only_with_its_own_history(tmp_path: Path) -> None:
    def config(resume: str) -> Any:
        return pool_config(tmp_path, tmp_path / "model", checkpoint={"resume": resume})

    assert not goes_on(config("auto"))
    directory = CheckpointDirectory(config("auto").checkpoint_dir)
    make_checkpoint(directory, 2)
    assert goes_on(config("auto")) and goes_on(config(str(directory.path(2)))) and goes_on(config(str(directory.root)))
    assert not goes_on(config("never")) and not goes_on(config(str(tmp_path / "elsewhere" / "iter_0000002")))


@given(
    st.sets(st.integers(1, 60), max_size=20),
    st.integers(1, 4),
    st.integers(0, 7),
    st.sets(st.integers(1, 60), max_size=3),
    st.none() | st.integers(1, 60),
)
def test_retention(steps: set[int], last: int, every: int, leased: set[int], best: int | None) -> None:
    doomed = to_delete(steps, keep_last=last, keep_every=every, best=best, leased=leased)
    kept = steps - set(doomed)
    assert set(doomed) <= steps and doomed == sorted(doomed)
    assert set(sorted(steps)[-last:]) <= kept
    assert not set(doomed) & (leased | {best})
    assert all(step % every for step in doomed) if every else True
    newest = set(sorted(steps)[-last:])
    assert all(step in newest | leased | {best} or (every and step % every == 0) for step in kept)


def test_the_best_is_the_earliest_of_equals() -> None:
    assert best_step({2: 0.5, 4: 0.7, 6: 0.7}, "max") == 4
    assert best_step({2: 0.5, 4: 0.7, 6: 0.5}, "min") == 2
    assert best_step({}, "max") is None


def test_a_lease_holds_while_its_process_lives(directory: CheckpointDirectory) -> None:
    make_checkpoint(directory, 2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    directory.lease(2, ProcessId.of(child.pid))
    assert directory.leased() == {2}
    child.kill()
    child.wait(timeout=60)
    assert directory.leased() == set() and not list(directory.root.glob("leases/*.json"))


def test_a_deletion_that_is_cut_off_leaves_no_checkpoint(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        make_checkpoint(directory, step)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.delete(2)
    assert directory.steps() == [4]
    monkeypatch.undo()
    directory.sweep()
    assert [path.name for path in directory.root.iterdir() if path.is_dir()] == ["iter_0000004"]


def test_result_files_go_back_to_the_byte(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    committed = positions(tmp_path)
    before = metrics.read_bytes()
    with metrics.open("a") as file:
        file.write('{"step": 3, "policy/loss": 0.5}\n{"step": 4, "pol')  # the kill cut a line short
    (tmp_path / "samples.jsonl").write_text('{"step": 3}\n')  # was not there yet
    assert roll_back(tmp_path, committed) == 2
    assert metrics.read_bytes() == before and (tmp_path / "samples.jsonl").read_bytes() == b""
    assert [json.loads(line) for line in (tmp_path / ROLLED_BACK).read_text().splitlines()] == [
        {"file": "metrics.jsonl", "step": 3, "policy/loss": 0.5},
        {"file": "samples.jsonl", "step": 3},
    ]
    assert roll_back(tmp_path, committed) == 0


def test_another_model_or_tokenizer_contradicts_and_the_rest_is_only_told() -> None:
    saved = {"model": {"hidden": 64, "rope": [1.0]}, "tokenizer": "a", "prompts": "p"}
    assert contradictions(saved, json.loads(json.dumps(saved))) == []
    assert contradictions(saved, {**saved, "model": {"hidden": 64, "rope": (1.0,)}}) == []
    [problem] = contradictions(saved, {**saved, "model": {"hidden": 128, "rope": [1.0]}})
    assert "hidden is 128, the checkpoint has 64" in problem
    assert "tokenizer" in contradictions(saved, {**saved, "tokenizer": "b"})[0]
    assert "data.path" in contradictions(saved, {**saved, "prompts": "q"})[0]
    before = {"trainer": {"optimizer": {"lr": 1e-3}, "gpus": 2}, "checkpoint": {"resume": "auto"}}
    after = {"trainer": {"optimizer": {"lr": 5e-4}, "gpus": 2}, "checkpoint": {"resume": "x"}}
    assert changes(before, after) == ["trainer.optimizer.lr: 0.001 -> 0.0005"]


def test_unreadable_manifest_of_another_version(directory: CheckpointDirectory) -> None:
    path = make_checkpoint(directory, 2)
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(DamagedCheckpointError, match="format 99"):
        Manifest.read(path)
    assert os.path.isdir(path)
