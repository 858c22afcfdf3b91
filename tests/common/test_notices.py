"""Notices go from processes of the pool to the terminal, once and harmless."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.common.notices import MAX_CHARACTERS, NoticeWatch, notices_file, write_notice
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
    wait_until(lambda: shown == ["two\nlines"], 5.0, "the notice")
    write_notice(run_dir, "last")
    watch.close()
    watch.close()
    write_notice(run_dir, "too late")
    assert shown == ["two\nlines", "last"]


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
    notices_file(run_dir).write_text("")  # cut by somebody
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


def test_a_place_that_cannot_be_written_costs_only_the_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_notice(tmp_path / "nowhere", "lost")
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "notice: lost" and "could not be written: " in second and str(tmp_path / "nowhere") in second
    assert not list(tmp_path.iterdir())


def test_a_terminal_that_fails_does_not_end_the_watch(run_dir: Path) -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        if text == "bad":
            raise OSError("no terminal")
        shown.append(text)

    watch = NoticeWatch(run_dir, show, interval_s=0.01)
    write_notice(run_dir, "bad")
    wait_until(lambda: watch._position > 0, 5.0, "the first notice")
    write_notice(run_dir, "good")
    watch.close()
    assert shown == ["good"]
