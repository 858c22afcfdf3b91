"""The journal's file: what is written is read again, whatever a kill leaves at its end."""

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.resume.journal_file import JournalFile, framed, groups_started

RECORDS = [b"one", b"", b"three" * 50]


def written(directory: Path) -> JournalFile:
    journal = JournalFile(directory / "journal")
    assert journal.read() == []
    journal.append(RECORDS[:2])
    journal.append(RECORDS[2:])
    return journal


def test_after_the_file_was_moved_a_new_one_holds_only_what_is_written_then(tmp_path: Path) -> None:
    journal = written(tmp_path)
    journal.path.rename(tmp_path / "moved")
    assert journal.moved
    journal.append([b"next"])
    assert JournalFile(journal.path).read() == [b"next"] and not journal.moved
    assert JournalFile(tmp_path / "moved").read() == RECORDS


def test_nobody_writes_between_the_look_at_all_records_and_the_choice(tmp_path: Path) -> None:
    """A second tidying in between would make the counts of the first one wrong."""
    journal, seen = written(tmp_path), []
    others: list[threading.Thread] = []

    def visit(record: bytes) -> None:
        seen.append(record)
        if not others:
            others.append(threading.Thread(target=journal.keep, args=(lambda record: False,)))
            others[0].start()

    def choose(record: bytes) -> bool:
        time.sleep(0.02)
        assert others[0].is_alive(), "the other one did not wait"
        return record in seen

    journal.tidy(visit, choose)
    others[0].join(10)
    assert seen == RECORDS and JournalFile(journal.path).read() == []


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
    journal.tidy(shown.append, lambda record: record != b"one")
    assert shown == RECORDS
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


def test_the_head_counts_groups_alongside_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = JournalFile(path)
    assert groups_started(path) == 0
    journal.count(3)
    assert groups_started(path) == 3 and JournalFile(path).read() == []
    journal.append(RECORDS)
    journal.count(12)
    journal.keep(lambda record: record != b"one")
    assert groups_started(path) == 12 and JournalFile(path).read() == RECORDS[1:]
    path.rename(tmp_path / "moved")
    journal.count(13)
    assert not path.exists(), "the next record begins the new file"
    journal.append([b"next"])
    assert groups_started(path) == 13 and JournalFile(path).read() == [b"next"]
    assert groups_started(tmp_path / "moved") == 12


def test_groups_are_counted_while_a_record_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts groups must not wait for it."""
    journal, slow = written(tmp_path), threading.Event()
    reached = threading.Event()

    def hang(descriptor: int) -> None:
        reached.set()
        slow.wait(20)

    monkeypatch.setattr("os.fsync", hang)
    writer = threading.Thread(target=journal.append, args=([b"next"],))
    writer.start()
    assert reached.wait(20)
    journal.count(7)
    assert groups_started(journal.path) == 7 and writer.is_alive()
    slow.set()
    writer.join(20)
    assert JournalFile(journal.path).read() == [*RECORDS, b"next"]


def test_a_journal_of_an_earlier_release_has_no_head_and_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"".join(map(framed, RECORDS)))
    assert groups_started(path) == 0
    journal = JournalFile(path)
    assert journal.read() == RECORDS
    journal.count(4)
    journal.append([b"next"])
    assert groups_started(path) == 4 and JournalFile(path).read() == [*RECORDS, b"next"]
    assert journal.size == path.stat().st_size


def test_a_head_that_is_damaged_costs_its_number_only(tmp_path: Path) -> None:
    journal = written(tmp_path)
    content = bytearray(journal.path.read_bytes())
    content[20:30] = bytes(10)
    journal.path.write_bytes(content)
    assert groups_started(journal.path) == 0 and JournalFile(journal.path).read() == RECORDS
