"""The report of a failed run (one message on the terminal, error.txt, summary.json, exit.json), and earlier results."""

import json
import logging
import os
import platform
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from megarl.checkpoint.save.history import ROLLED_BACK
from megarl.common.files import write_json
from megarl.common.rundir import run_files
from megarl.common.rundir.rotating_lines import older_parts
from megarl.common.rundir.run_files import ExitRecord, write_exit
from megarl.common.rundir.run_lock import Holder, other_holder
from megarl.telemetry.metrics.summary import RunSummary

logger = logging.getLogger(__name__)

RESULTS = ("metrics.jsonl", "samples.jsonl", "summary.json", "error.txt", "tensorboard", "wandb.json", "mlflow.json",
           "batches", "failed_batch", ROLLED_BACK, "events", "rollout.journal", "schedule.jsonl",
           "checkpoints")  # fmt: skip


def set_aside(run_dir: Path) -> Path | None:
    """Move the results of an earlier run in the same directory to RUN_DIR/previous/N; None if there are none.

    One rank calls it at the start.
    """
    paths = [*(run_dir / name for name in RESULTS), *run_dir.glob("eval_*.jsonl")]
    paths += [
        part for name in ("metrics.jsonl", "samples.jsonl", ROLLED_BACK) for _, part in older_parts(run_dir / name)
    ]
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    before = run_dir / "previous"
    target = before / str(1 + max((int(p.name) for p in before.glob("*") if p.name.isdigit()), default=0))
    target.mkdir(parents=True)
    for path in found:
        path.rename(target / path.name)
    return target


CLOCK_S = 60.0  # how far the clock of a file server may be behind


class PeerFailedError(RuntimeError):
    """Another rank has failed and reports the cause; the rank that raises this error only logs."""


class FailureReport:
    """Lets the first failing rank report to the user and the others only log, so one cause gives one message.

    After another run has taken the directory nothing is written there, and every failing rank informs the user.
    """

    def __init__(self, run_dir: Path, rank: int, mine: Holder | None = None) -> None:
        """`mine`: the holder of `run_dir` that this rank belongs to; None if it is not claimed."""
        self.path = run_dir / "error.txt"
        self.rank, self._mine = rank, mine
        self._started = time.time()
        self._claimed: list[BaseException] = []

    def claim(self, error: BaseException, terminal: TextIO, log_file: Path) -> bool:
        """Write the traceback to this rank's log and, if no rank has failed before, one message to the terminal.

        The same error can be claimed again, which does nothing.
        """
        if any(error is each for each in self._claimed):
            return False
        self._claimed.append(error)
        traceback.print_exception(error)
        if isinstance(error, PeerFailedError):
            return False
        other = other_holder(self.path.parent, self._mine) if self._mine is not None else None
        if other is not None:
            taken = f"{self.path.parent} was taken by {other.describe()}, and nothing is recorded there"
            terminal.write(f"megarl: {describe(error)}\n(rank {self.rank} on {platform.node()}; {taken})\n")
            terminal.flush()
            return False
        if not self._is_first():
            return False
        message = f"megarl: {describe(error)}\n(rank {self.rank} on {platform.node()}; traceback in {log_file})\n"
        # The terminal first: it works even if the disk is full.
        terminal.write(message)
        terminal.flush()
        for write in (lambda: self.path.write_text(message), lambda: self._mark_failed(describe(error))):
            try:
                run_files.with_reserve(self.path.parent, write)
            except (OSError, ValueError) as failure:
                terminal.write(f"megarl: the failure was not fully recorded in {self.path.parent}: {failure}\n")
        return True

    def _is_first(self) -> bool:
        """Claim the report by creating error.txt. On a disk where this is impossible, every rank reports."""
        try:
            if self.path.exists() and self.path.stat().st_mtime < self._started - CLOCK_S:
                self.path.unlink()  # an earlier run's, which this one has not moved aside yet
            run_files.with_reserve(
                self.path.parent, lambda: os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            )
        except FileExistsError:
            return False
        except OSError:
            traceback.print_exc()
        return True

    def _mark_failed(self, message: str) -> None:
        """Record the failure in exit.json and summary.json for rank 0, which may be killed first.

        A recorded failure keeps its step, which is that of the newest checkpoint if the last save failed.
        """
        path = self.path.with_name("summary.json")
        content = json.loads(path.read_text()) if path.is_file() else RunSummary().as_dict("failed")
        try:
            before = run_files.read_exit(self.path.parent)
        except run_files.ExitRecordError:  # it is replaced
            before = None
        step = before.step if before is not None and before.status == "failed" else content.get("steps", 0)
        write_exit(self.path.parent, ExitRecord("failed", step, message))
        write_json(path, {**content, "exit": "failed", "error": message})


def report_and_close(error: BaseException, report: Callable[[Exception], object], close: Callable[[], object]) -> None:
    """Report why the training of this rank ended, then close its parts; never raises. The report comes first: closing
    may wait for an unreachable pool, and other ranks would then be reported as the cause because they are missing.
    """
    if isinstance(error, Exception):
        report(error)
    try:
        close()
    except Exception as failure:  # the first error is the one to report
        logger.warning("closing after a failure failed too: %r", failure)


def describe(error: BaseException) -> str:
    """Return an error's message for the user: megarl's own unchanged, a library's with its type in front."""
    ours = type(error).__module__.startswith("megarl.") or type(error) in (
        ValueError,
        FileNotFoundError,
        TimeoutError,
    )
    text = str(error) or type(error).__name__
    return text if ours else f"{type(error).__name__}: {text}"
