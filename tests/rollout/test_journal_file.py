"""The journal's file: what is written is read again, whatever a kill leaves at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.journal_file import JournalFile

RECORDS = [b"one", b"", b"three" * 50]


def written(directory: Path) -> JournalFile:
    journal = JournalFile(directory / "journal")
    assert journal.read() == []
    journal.append(RECORDS[:2])
    journal.append(RECORDS[2:])
    return journal


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(1, 300), noise=st.binary(max_size=40), flip=st.booleans())
def test_a_torn_end_costs_only_the_last_record(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes, flip: bool
) -> None:
    path = written(tmp_path_factory.mktemp("journal")).path
    content = path.read_bytes()
    last = len(RECORDS[2])
    if flip:
        place = len(content) - 1 - cut % last
        content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    else:
        content = content[: len(content) - 1 - cut % last]
    path.write_bytes(content + noise)
    journal = JournalFile(path)
    assert journal.read() == RECORDS[:2]
    journal.append([b"next"])
    assert JournalFile(path).read() == [*RECORDS[:2], b"next"]


def test_records_are_removed_and_others_follow(tmp_path: Path) -> None:
    journal, shown = written(tmp_path), list[bytes]()
    journal.scan(shown.append)
    assert shown == RECORDS
    journal.keep(lambda record: record != b"one")
    journal.append([b"four"])
    assert JournalFile(journal.path).read() == [*RECORDS[1:], b"four"]
    assert journal.size == journal.path.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_a_write_that_fails_leaves_the_records_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = written(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr("os.fsync", full)
        journal.append([b"lost"])
    journal.append([b"four"])
    assert JournalFile(journal.path).read() == [*RECORDS, b"four"]
