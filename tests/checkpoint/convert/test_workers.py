"""The converter's worker processes: one that hangs is reported although others go on."""

import json
import subprocess
import sys
import time

import pytest

from megarl.checkpoint.convert import workers
from megarl.checkpoint.convert.workers import ReportBytes, run_units
from megarl.common.errors import ConversionError
from tests.support.checkpoints.freed_copies import UNITS

HANGS = 3
OTHERS = 400


def hang_in_one(number: int, report: ReportBytes) -> None:
    time.sleep(600.0 if number == HANGS else 0.02)
    report(1)


def test_a_worker_that_hangs_is_reported_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SILENCE_S", 3.0)
    done: list[int] = []
    with pytest.raises(ConversionError, match=f"unit {HANGS} has made no progress for 3 s.*--resume"):
        run_units([HANGS, *range(10, 10 + OTHERS)], hang_in_one, 2, done.append)
    assert 0 < len(done) < OTHERS


def slow_with_reports(number: int, report: ReportBytes) -> None:
    for _ in range(11):
        time.sleep(0.3)
        report(1)


def test_a_long_unit_that_reports_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SILENCE_S", 3.0)
    done: list[int] = []
    run_units([0, 1], slow_with_reports, 2, done.append)
    assert sum(done) == 22


COPY_MIB = 24  # glibc's own limit for blocks on the heap rises to 32 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_what_a_worker_has_freed_is_returned() -> None:
    """Small objects that outlive a copy of a tensor lie above it on a heap, which then cannot give its place back."""
    command = [sys.executable, "-m", "tests.support.checkpoints.freed_copies", str(COPY_MIB)]
    grown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert len(grown) == UNITS and max(grown) < COPY_MIB / 2, grown
