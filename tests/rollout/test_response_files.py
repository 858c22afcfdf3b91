"""The responses of evaluations on a disk that is full for a time."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.rollout import response_files
from megarl.rollout.response_files import ResponseFiles


class Disk:
    """Refuses every write while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, real = True, response_files._replace

        def replace(path: Path, parts: Iterator[bytes]) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(path, parts)

        monkeypatch.setattr(response_files, "_replace", replace)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def lines(*texts: str) -> Callable[[], list[str]]:
    return lambda: list(texts)


def test_what_the_disk_does_not_take_is_written_later_and_told_twice(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    files, path = ResponseFiles(told.append), tmp_path / "eval_before.jsonl"
    monkeypatch.setattr(response_files, "RETRY_S", 0.01)

    async def scenario() -> None:
        files.write(path, lines("first", "s\u00e9cond", "\ud800"))
        trying = asyncio.create_task(files.keep_trying())
        await asyncio.sleep(0.1)
        assert files.waits and not trying.done() and not list(tmp_path.iterdir())
        disk.full = False
        async with asyncio.timeout(20):
            await trying

    asyncio.run(scenario())
    assert path.read_text() == "first\ns\u00e9cond\n?\n" and not files.waits
    assert [text.partition(str(path))[2][:22] for text in told] == [" could not be written ", " could not be written "]
    assert "No space left" in told[0] and "is complete now" in told[1]


def test_a_later_evaluation_replaces_what_waits(tmp_path: Path, disk: Disk) -> None:
    files, path = ResponseFiles(lambda text: None), tmp_path / "eval_after.jsonl"
    files.write(path, lines("old"))
    disk.full = False
    files.write(path, lines("new"))
    files.close()
    assert path.read_text() == "new\n"


def test_what_is_lost_is_told(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    files = ResponseFiles(told.append)
    monkeypatch.setattr(response_files, "WAITING_BYTES", 100)
    files.write(tmp_path / "eval_1.jsonl", lines("x" * 60))
    files.write(tmp_path / "eval_2.jsonl", lines("y" * 60))
    assert "eval_2.jsonl is lost: it could not be written" in told[1]
    files.close()
    assert len(told) == 3 and "eval_1.jsonl is lost: the disk has not taken it" in told[2]


def test_a_file_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "eval_after.jsonl"
    path.write_text("old\n")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    files = ResponseFiles(lambda text: None)
    files.write(path, lines("new"))
    assert path.read_text() == "old\n" and [each.name for each in tmp_path.iterdir()] == [path.name] and files.waits
