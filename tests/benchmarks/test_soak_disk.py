"""A file system of its own for the run directory: filled, emptied, and its files kept at the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from benchmarks import soak_disk
from benchmarks.soak_disk import CHUNK, FILLER, fill, small_disk, why_no_disk


def test_a_run_directory_is_full_for_a_time_and_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_no_disk():
        pytest.skip(reason)
    monkeypatch.setattr(soak_disk, "SIZE", "1m")
    monkeypatch.setattr(soak_disk, "POLL_S", 0.01)
    run_dir, errors = tmp_path / "run", list[int | None]()

    def write() -> bool:
        try:
            (run_dir / "more").write_bytes(CHUNK)
        except OSError as error:
            errors.append(error.errno)
        return True

    with small_disk(run_dir):
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "rank.log").write_text("a line\n")
        assert 0 <= fill(run_dir, 60.0, write) < 30
        assert errors == [] or errors == [errno.ENOSPC]
        fill(run_dir, 0.2, lambda: bool(errors) or (write() and False))
        assert errors == [errno.ENOSPC] and not (run_dir / FILLER).exists()
        (run_dir / "more").write_bytes(b"there is room again")
    assert not os.path.ismount(run_dir)
    assert (run_dir / "logs" / "rank.log").read_text() == "a line\n"
    assert (run_dir / "more").read_bytes() == b"there is room again"


def test_only_a_file_system_of_its_own_is_filled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file system of its own and is not filled"):
        fill(tmp_path, 0.1, lambda: True)
    assert not list(tmp_path.iterdir())


def test_without_root_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_disk.os, "geteuid", lambda: 1000)
    assert why_no_disk() == "only root may mount a small file system for the run directory"


def test_a_container_that_may_not_mount_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: Path) -> None:
        raise PermissionError("mount")

    monkeypatch.setattr(soak_disk.os, "geteuid", lambda: 0)
    monkeypatch.setattr(soak_disk, "_mount", refused)
    assert why_no_disk() == "no file system can be mounted for the run directory: mount"
