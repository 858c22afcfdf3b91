"""The directory of checkpoints: what counts as one, deletions: exact, without ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory, continues_history
from tests.support.checkpoints.sample_checkpoints import make_checkpoint


def test_only_what_has_a_manifest_is_a_checkpoint(directory: CheckpointDirectory) -> None:
    make_checkpoint(directory, 2)
    partial = directory.create_partial(4)
    (partial / "shard").write_bytes(b"half")
    assert directory.steps() == [2]
    (directory.root / "iter_0000006").mkdir()  # a rename without a manifest cannot happen, a copy can
    assert directory.steps() == [2]
    assert (directory.root / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    directory.create_partial(8)
    assert not partial.exists()


def test_goes_on_only_with_its_own_history(directory: CheckpointDirectory, tmp_path: Path) -> None:
    assert not continues_history(directory.root, "auto")
    make_checkpoint(directory, 2)
    for own in ("auto", str(directory.path(2)), str(directory.root)):
        assert continues_history(directory.root, own)
    for other in ("never", str(tmp_path / "elsewhere" / "iter_0000002")):
        assert not continues_history(directory.root, other)


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
