"""The directory of checkpoints: what counts as one, retention, leases: exact, without ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.save.directory import CheckpointDirectory, best_step, continues_history, to_delete
from megarl.common.processes import ProcessId
from tests.support.pool import pool_config
from tests.support.sample_checkpoints import make_checkpoint


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


def test_goes_on_only_with_its_own_history(tmp_path: Path) -> None:
    def config(resume: str) -> Any:
        return pool_config(tmp_path, tmp_path / "model", checkpoint={"resume": resume})

    assert not continues_history(config("auto"))
    directory = CheckpointDirectory(config("auto").checkpoint_dir)
    make_checkpoint(directory, 2)
    assert (
        continues_history(config("auto"))
        and continues_history(config(str(directory.path(2))))
        and continues_history(config(str(directory.root)))
    )
    assert not continues_history(config("never")) and not continues_history(
        config(str(tmp_path / "elsewhere" / "iter_0000002"))
    )


@given(
    st.sets(st.integers(1, 60), max_size=20),
    st.integers(1, 4),
    st.integers(0, 7),
    st.sets(st.integers(1, 60), max_size=3),
    st.none() | st.integers(1, 60),
)
def test_retention(steps: set[int], last: int, every: int, leased: set[int], best: int | None) -> None:
    obsolete = to_delete(steps, keep_last=last, keep_every=every, best=best, leased=leased)
    kept = steps - set(obsolete)
    assert set(obsolete) <= steps and obsolete == sorted(obsolete)
    assert set(sorted(steps)[-last:]) <= kept
    assert not set(obsolete) & (leased | {best})
    assert all(step % every for step in obsolete) if every else True
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
