"""Notices go from processes of the pool to the terminal, once and harmless."""

import errno
import threading
from pathlib import Path

import pytest

from megarl.common.rundir import notices
from megarl.common.rundir.notices import MAX_CHARACTERS, NoticeWatch, notices_file, write_notice
from tests.support.waiting import wait_until


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_what_is_written_meanwhile_is_shown_once(run_dir: Path) -> None:
    shown: list[str] = []
    write_notice(run_dir, "of an earlier start")
    watch = NoticeWatch(run_dir, shown.append, interval_s=0.01)
    write_notice(run_dir, "two\nlines")
    wait_until(lambda: shown == ["two\nlines"], 60, "the notice")
    write_notice(run_dir, "last")
    watch.close()
    watch.close()
    write_notice(run_dir, "too late")
    assert shown == ["two\nlines", "last"]


def test_what_is_written_can_be_shown_at_once_and_is_not_shown_again(run_dir: Path) -> None:
    shown: list[str] = []
    watch = NoticeWatch(run_dir, shown.append, interval_s=60.0)
    write_notice(run_dir, "the cause")
    watch.show_new()
    assert shown == ["the cause"]
    watch.close()
    assert shown == ["the cause"]


def test_a_disk_that_hangs_holds_nobody_who_wants_them_shown(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    watch, released = NoticeWatch(run_dir, shown.append, interval_s=60.0), threading.Event()
    write_notice(run_dir, "the cause")
    read = watch._show_lines
    monkeypatch.setattr(watch, "_show_lines", lambda: read() if released.wait(30.0) else None)
    watch.show_new(within_s=0.05)
    assert shown == []
    released.set()
    watch.close()
    assert shown == ["the cause"], "shown when the disk answers, and once"


def test_what_is_no_notice_is_passed_over_and_a_line_is_shown_when_it_is_complete(run_dir: Path) -> None:
    shown: list[str] = []
    watch = NoticeWatch(run_dir, shown.append, interval_s=60.0)
    with notices_file(run_dir).open("ab") as file:
        file.write(b'\xff\n[]\n{"text": 3}\n{"text": "good"}\n{"text": "ha')
    watch._look()
    assert shown == ["good"]
    with notices_file(run_dir).open("ab") as file:
        file.write(b'lf"}\n')
    watch._look()
    write_notice(run_dir, "next")
    watch.close()
    assert shown == ["good", "half", "next"]


def test_a_notice_cannot_control_the_terminal_and_is_bounded(run_dir: Path) -> None:
    shown: list[str] = []
    watch = NoticeWatch(run_dir, shown.append)
    write_notice(run_dir, "\x1b[2Jé\r" + "x" * 10_000)
    watch.close()
    assert shown[0].startswith("\\x1b[2Jé\\x0dxxx") and shown[0].count("x") < MAX_CHARACTERS + 10


def test_a_notice_that_the_disk_does_not_take_is_shown_with_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_notice(tmp_path / "later", "first")
    said, failed = (record.getMessage() for record in caplog.records)
    assert said == "notice: first" and "kept until the next one: " in failed and str(tmp_path / "later") in failed
    assert not list(tmp_path.iterdir())
    for number in range(2 * notices._MOST_WAITING):
        write_notice(tmp_path / "later", f"{number}")
    (tmp_path / "later" / "logs").mkdir(parents=True)
    shown: list[str] = []
    watch = NoticeWatch(tmp_path / "later", shown.append, interval_s=60.0)
    write_notice(tmp_path / "later", "next")
    watch.close()
    most = notices._MOST_WAITING
    assert shown == [*(f"{number}" for number in range(most + 1, 2 * most)), "next"] and not notices._waiting


def test_the_files_of_notices_are_bounded_and_every_one_is_shown_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "FULL_BYTES", 2200)
    shown: list[str] = []
    watch = NoticeWatch(run_dir, shown.append, interval_s=60.0)
    for number in range(500):
        write_notice(run_dir, f"notice {number:03d}")
        if number % 30 == 0:
            watch._look()
    watch._look()
    watch.close()
    assert shown == [f"notice {number:03d}" for number in range(500)]
    files = sorted((run_dir / "logs").iterdir())
    assert [path.name for path in files] == ["notices.1.jsonl", "notices.jsonl"]
    assert all(path.stat().st_size < 2300 for path in files)


def test_a_file_system_that_fails_for_a_moment_shows_nothing_twice(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    watch = NoticeWatch(run_dir, shown.append, interval_s=60.0)
    write_notice(run_dir, "first")
    watch._look()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", lambda path: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale")))
        watch._look()
    write_notice(run_dir, "second")
    watch.close()
    assert shown == ["first", "second"]


def test_a_terminal_that_fails_does_not_end_the_watch(run_dir: Path) -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        if text == "bad":
            raise OSError("no terminal")
        shown.append(text)

    watch = NoticeWatch(run_dir, show, interval_s=0.01)
    write_notice(run_dir, "bad")
    wait_until(lambda: watch._lines.position > 0, 60, "the first notice")
    write_notice(run_dir, "good")
    watch.close()
    assert shown == ["good"]
