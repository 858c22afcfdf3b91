"""The stop signals of a trainer rank, SIGINT and SIGTERM: the first asks to stop, a second one ends the rank.

A Python handler runs only while the main thread is in Python code, but a rank may wait for minutes in a collective or
for an engine. So a thread reads the signals from a pipe, to which Python's C code writes at once
(`signal.set_wakeup_fd`), and answers in every phase of a run.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.common.rundir.run_files import ExitRecord, stop_reason, write_exit
from megarl.common.rundir.run_lock import Holder, other_holder
from megarl.common.trust.object_collectives import TEXT
from megarl.run.ranks.control_group import ControlGroup

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# One Ctrl-C may arrive more than once, from the terminal and through torchrun.
SAME_REQUEST_S = 1.0
# After a rank has failed torchrun sends SIGTERM to the others: that rank reports, and this one may be about to.
REPORT_S = 2.0


def end_before_start(*, speaks: bool) -> None:
    """End this process with a message at the first stop signal from now on, because nothing has started.

    `speaks`: only one rank should print the message. It goes to the present standard error, even if that is redirected
    later. `StopSignals.install` takes over the signals.
    """
    terminal = os.dup(2)

    def end(number: int, frame: FrameType | None) -> None:
        text = f"megarl: {signal.Signals(number).name} before the run had started; the same command starts it\n"
        with suppress(OSError):
            if speaks:
                os.write(terminal, text.encode())
        os._exit(1)

    for number in SIGNALS:
        signal.signal(number, end)


class StopSignals:
    """Counts the stop signals of this process. `raised`: one has come since `install`."""

    def __init__(
        self, run_dir: Path, checkpoints: Path, terminal: TextIO, *, speaks: bool, mine: Holder | None = None
    ) -> None:
        """`speaks`: report to the user; only one rank should.

        `mine`: the holder of `run_dir` that this rank belongs to. Nothing is written there once another run holds it.
        """
        self._run_dir, self._directory, self._mine = run_dir, CheckpointDirectory(checkpoints), mine
        self._terminal, self._speaks = terminal, speaks
        self._running = False
        self._first_at: float | None = None
        self._exit: Callable[[int], object] = os._exit
        self.raised = False
        self.name = ""  # of the first signal

    def install(self) -> None:
        """Handle the signals from now on. Call it once, in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._set_handlers()
        threading.Thread(target=self._read, args=(reader,), name="stop-signals", daemon=True).start()

    def run_has_begun(self) -> None:
        """Treat the first signal as a request from now on. Before this, it ends the rank, because there is nothing to
        save.

        Call it in the main thread, after `ray.init`, which sets its own handler.
        """
        self._running = True
        self._set_handlers()

    def _set_handlers(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        self.raised = True

    def _read(self, reader: int) -> None:
        while received := os.read(reader, 64):
            for number in received:
                if number in SIGNALS:
                    self.receive(signal.Signals(number))

    def receive(self, number: signal.Signals) -> None:
        """Act on one signal."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            if self._running:
                self.name = self.name or number.name
                self.raised = True
                if number == signal.SIGINT:  # a SIGTERM may be torchrun's, after a failure
                    self._say("finishing the step, saving; again to abort")
            else:
                failed = f" (torchrun sends it also if another rank has failed: see {self._run_dir / 'logs'})"
                self._end(f"{number.name} while the run was starting{failed if number == signal.SIGTERM else ''}")
        elif now > self._first_at + SAME_REQUEST_S:
            self._end(f"aborted by a second stop signal ({number.name})")

    def _end(self, why: str) -> None:
        """End this rank at once and say how to resume, unless a failed rank reports."""
        try:
            if "SIGTERM" in why:
                time.sleep(REPORT_S)
            other = other_holder(self._run_dir, self._mine) if self._mine is not None else None
            if other is not None:
                self._say(f"{why}; {self._run_dir} was taken by {other.describe()}, and nothing is recorded there")
            elif self._speaks and not (self._run_dir / "error.txt").exists():
                step = max(self._directory.steps(), default=None)
                how = "starts again: nothing is saved" if step is None else f"resumes after step {step}"
                self._say(f"{why}; the same command {how}")
                with suppress(OSError):
                    write_exit(self._run_dir, ExitRecord("failed", step or 0, why))
        finally:
            self._exit(1)

    def _say(self, text: str) -> None:
        if self._speaks:
            line_before = "\n" if self._terminal.isatty() else ""  # the terminal has echoed ^C after the live line
            self._terminal.write(f"{line_before}megarl: {text}\n")
            self._terminal.flush()


# The decision to stop early, which all trainer ranks make together between two steps.


class StopVote:
    """Combines the stop requests: RUN_DIR/stop, which rank 0 looks for, and a stop signal to any rank."""

    def __init__(self, run_dir: Path, peers: ControlGroup, signals: StopSignals) -> None:
        self._run_dir, self._peers, self._signals = run_dir, peers, signals
        self._request: str | None = None  # rank 0's last reading of the file

    def install(self) -> None:
        """Treat a signal as a request. Call it in the main thread, after `ray.init`, which sets its own handler."""
        self._signals.run_has_begun()

    def asked(self) -> bool:
        """Return whether this rank knows of a request. Not collective."""
        self._request = stop_reason(self._run_dir) if self._peers.is_first else None
        return self._signals.raised or self._request is not None

    def agree(self) -> str | None:
        """Return why the run was asked to stop, the same on every rank; None if it was not. Collective."""
        if not self._peers.any(self.asked()):
            return None
        return self._peers.on_first_rank(lambda: self._request or self._signals.name or "a stop signal", TEXT)
