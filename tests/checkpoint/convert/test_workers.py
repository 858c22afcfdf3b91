"""The converter's worker processes: one that hangs is told although others go on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megarl.checkpoint.convert import workers
from megarl.checkpoint.convert.workers import ReportBytes, run_units
from megarl.common.errors import ConversionError

HANGS = 3
OTHERS = 400


def hang_in_one(number: int, report: ReportBytes) -> None:
    time.sleep(60.0 if number == HANGS else 0.02)
    report(1)


def test_a_worker_that_hangs_is_told_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SILENCE_S", 1.0)
    done: list[int] = []
    with pytest.raises(ConversionError, match=f"unit {HANGS} has made no progress for 1 s.*--resume"):
        run_units([HANGS, *range(10, 10 + OTHERS)], hang_in_one, 2, done.append)
    assert 0 < len(done) < OTHERS


def slow_with_reports(number: int, report: ReportBytes) -> None:
    for _ in range(8):
        time.sleep(0.3)
        report(1)


def test_a_long_unit_that_reports_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SILENCE_S", 2.0)
    done: list[int] = []
    run_units([0, 1], slow_with_reports, 2, done.append)
    assert sum(done) == 16


COPY_MIB = 24  # glibc's own limit for blocks on the heap rises to 32 MiB


def private_mib() -> float:
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 2**10


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_what_a_worker_has_freed_is_returned(tmp_path: Path) -> None:
    """Small objects that outlive a copy of a tensor lie above it on a heap, which then cannot give its place back."""
    kept: list[bytearray] = []
    before: list[float] = []

    def copies(number: int, report: ReportBytes) -> None:
        before.append(private_mib())
        for _ in range(2):  # the first one that is freed raises glibc's own limit
            copy = bytearray(COPY_MIB * 2**20)
            copy[::4096] = b"x" * len(copy[::4096])
            kept.append(bytearray(2**16))
            del copy
        (tmp_path / str(number)).write_text(str(private_mib() - before[0]))

    run_units(range(8), copies, 2, lambda _: None)
    grown = [float((tmp_path / str(number)).read_text()) for number in range(8)]
    assert max(grown) < COPY_MIB / 2, grown
