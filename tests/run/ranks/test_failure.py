"""The files that a failed run leaves for those who ask how it ended."""

import errno
import io
import json
import os
from pathlib import Path

import pytest

from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_files
from megarl.common.rundir.run_files import ExitRecord
from megarl.common.rundir.run_lock import Holder, claim
from megarl.run.ranks.failure import FailureReport, report_and_close, set_aside
from tests.support.checkpoints.tree import tree_of


def test_a_failure_writes_exit_json_with_the_steps_that_were_done(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 7, "exit": "running"}')
    with (tmp_path / "terminal").open("w") as terminal:
        FailureReport(tmp_path, rank=1).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert run_files.read_exit(tmp_path) == ExitRecord("failed", 7, "no such thing")


def test_a_failure_that_is_recorded_already_keeps_its_step(tmp_path: Path) -> None:
    """All steps are done, but only some are saved: the last save has failed."""
    (tmp_path / "summary.json").write_text('{"steps": 7, "exit": "failed"}')
    run_files.write_exit(tmp_path, ExitRecord("failed", 4, "step 7 could not be saved"))
    FailureReport(tmp_path, rank=0).claim(ValueError("not saved"), io.StringIO(), tmp_path / "log")
    assert run_files.read_exit(tmp_path) == ExitRecord("failed", 4, "not saved")


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_has_lost_its_directory_only_tells_the_user(tmp_path: Path, finished: bool) -> None:
    mine = Holder.here("torchrun", ProcessId.own())
    claim(tmp_path, Holder.here("torchrun", ProcessId.own(), launch="another"), node_s=1.0)
    if finished:
        run_files.write_exit(tmp_path, ExitRecord("finished", 9, ""))
    before = tree_of(tmp_path)
    terminal = io.StringIO()
    assert not FailureReport(tmp_path, 1, mine).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert tree_of(tmp_path) == before
    reported = terminal.getvalue()
    assert reported.startswith("megarl: no such thing\n") and f"{tmp_path} was taken by torchrun" in reported


def test_a_run_that_holds_its_directory_or_whose_claim_is_given_up_reports(tmp_path: Path) -> None:
    mine = Holder.here("torchrun", ProcessId.own())
    held = claim(tmp_path, mine, node_s=1.0)
    assert FailureReport(tmp_path, 0, mine).claim(ValueError("first"), io.StringIO(), tmp_path / "log")
    held.release()
    assert not FailureReport(tmp_path, 1, mine).claim(ValueError("second"), io.StringIO(), tmp_path / "log")
    assert (tmp_path / "error.txt").read_text().startswith("megarl: first")


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_the_terminal_has_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", full_disk)
    monkeypatch.setattr(Path, "write_text", full_disk)
    terminal = io.StringIO()
    assert FailureReport(tmp_path, rank=0).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert terminal.getvalue().startswith("megarl: no such thing\n")
    assert "was not fully recorded in" in terminal.getvalue()


def test_a_damaged_exit_record_is_replaced(tmp_path: Path) -> None:
    (tmp_path / run_files.EXIT_FILE).write_text("{")
    FailureReport(tmp_path, rank=0).claim(ValueError("no such thing"), io.StringIO(), tmp_path / "log")
    assert run_files.read_exit(tmp_path) == ExitRecord("failed", 0, "no such thing")


def test_the_reserve_makes_room_for_the_exit_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full until the run gives up what it has reserved."""
    run_files.make_reserve(tmp_path)
    reserve, real = tmp_path / run_files.RESERVE_FILE, Path.write_text

    def write(path: Path, *arguments: object, **options: object) -> int:
        if reserve.exists():
            full_disk()
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", write)
    terminal = io.StringIO()
    FailureReport(tmp_path, rank=0).claim(ValueError("no such thing"), terminal, tmp_path / "log")
    assert run_files.read_exit(tmp_path) == ExitRecord("failed", 0, "no such thing")
    assert (tmp_path / "error.txt").read_text().startswith("megarl: no such thing")
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == "failed"
    assert terminal.getvalue().count("megarl: ") == 1


def test_the_error_of_an_earlier_run_silences_nobody_and_one_of_this_run_does(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_text("megarl: long ago")
    os.utime(tmp_path / "error.txt", (1, 1))
    reports = [FailureReport(tmp_path, rank) for rank in (0, 1)]
    first, second = io.StringIO(), io.StringIO()
    assert reports[0].claim(ValueError("now"), first, tmp_path / "log")
    assert not reports[1].claim(ValueError("a consequence"), second, tmp_path / "log")
    assert "now" in first.getvalue() and second.getvalue() == ""


def test_all_parts_of_earlier_metrics_and_samples_are_set_aside(tmp_path: Path) -> None:
    names = ["metrics.000000000000030.jsonl", "metrics.jsonl"]
    names += ["samples.000000000000000.jsonl", "samples.000000000000040.jsonl", "samples.jsonl"]
    for name in (*names, "samples.txt"):
        (tmp_path / name).write_text(name)
    assert set_aside(tmp_path) == tmp_path / "previous" / "1"
    assert sorted(path.name for path in (tmp_path / "previous" / "1").iterdir()) == names
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["samples.txt"]
    assert set_aside(tmp_path) is None


def test_a_failure_is_reported_before_anything_is_closed_and_once(tmp_path: Path) -> None:
    """Closing takes long where the pool cannot be reached; a rank that is missed meanwhile is not the cause."""
    failures, terminal = FailureReport(tmp_path, rank=0), io.StringIO()
    error = ValueError("the pool cannot be reached")

    def report(failure: Exception) -> bool:
        return failures.claim(failure, terminal, tmp_path / "log")

    def close() -> None:
        assert "the pool cannot be reached" in (tmp_path / "exit.json").read_text()
        assert not report(RuntimeError("rank 1 is silent"))
        raise OSError("nothing answers")

    report_and_close(error, report, close)
    assert terminal.getvalue().count("megarl: ") == 1
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "the pool cannot be reached"


def test_the_same_failure_is_in_the_log_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures, error = FailureReport(tmp_path, rank=0), ValueError("no such thing")
    assert failures.claim(error, io.StringIO(), tmp_path / "log")
    for another in (ValueError("a consequence"), error):  # found by a thread meanwhile, and at the end of the rank
        assert not failures.claim(another, io.StringIO(), tmp_path / "log")
    assert capsys.readouterr().err.count("no such thing") == 1


def test_an_interrupt_is_no_failure_and_closes_too() -> None:
    closed: list[bool] = []
    report_and_close(KeyboardInterrupt(), lambda failure: pytest.fail("reported"), lambda: closed.append(True))
    assert closed == [True]
