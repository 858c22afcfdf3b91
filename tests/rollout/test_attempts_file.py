"""The number of groups that were started, on a disk that is full for a time."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from megarl.rollout import attempts_file
from megarl.rollout.attempts_file import ATTEMPTS_FILE, AttemptsFile


def full(path: Path, content: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_once_and_the_number_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    counted = AttemptsFile(tmp_path, told.append)
    assert counted.read() == 0
    counted.write(3)
    with monkeypatch.context() as patched:
        patched.setattr(attempts_file, "write_json", full)
        counted.write(5)
        counted.write(7)
        assert counted.waits and counted.read() == 3
        assert len(told) == 1 and "No space left on device" in told[0] and "tries again" in told[0]
    counted.write(9)
    assert not counted.waits and counted.read() == 9 and len(told) == 2 and "is written again" in told[1]
    counted.write(11)
    assert len(told) == 2


def test_a_number_that_cannot_be_read_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    (tmp_path / ATTEMPTS_FILE).write_text(json.dumps({"attempts": 7}))
    counted = AttemptsFile(tmp_path, told.append)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda path: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale")))
        assert counted.read() == 0
    assert counted.read() == 7 and len(told) == 1 and "do not count as rolled back" in told[0]
