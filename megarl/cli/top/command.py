"""`megarl top`: shows a run in the terminal until a key ends it; `--once` prints one frame."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from megarl.cli.top.run_view import RunWatch

# Single keys from a terminal, without waiting for the end of a line; the terminal is as before afterwards.


class Keys:
    """Reads keys while it is open; without a terminal at stdin there are none."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] | None = None  # of termios

    def __enter__(self) -> Keys:
        if self._file >= 0:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def wait(self, seconds: float) -> str:
        """Return the keys that were pressed, as soon as there are any; empty after `seconds` without."""
        if self._file < 0:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(self._file, 256)
        if not pressed:  # the terminal has gone
            raise EOFError
        return pressed.decode(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)


WIDTH = 100  # characters without a terminal
HEIGHT = 60  # lines of `--once`, and without a terminal
END_KEYS = set("qQ\x03\x04")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top` to the `megarl` command."""
    top = commands.add_parser(
        "top",
        help="show a run in the terminal: progress, reward, throughput, waiting, lag, engines, faults, notices",
        description="Show a run, living or finished, from the files of its directory; on any host that has them. "
        "Nothing is written there, and the run does not notice. q or Ctrl-C ends it.",
    )
    top.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of the run")
    top.add_argument("--once", action="store_true", help="print one frame; so it is without a terminal too")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds per look (default: %(default)s)")
    top.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the run; return the exit status. Raises FileNotFoundError if there is none."""
    from rich.console import Console

    from megarl.cli.top.run_view import RunWatch
    from megarl.cli.top.screen import Screen

    watch = RunWatch(options.run_dir)
    is_terminal = sys.stdout.isatty()
    if is_terminal and not options.once:
        _watch(watch, Console(highlight=False), max(0.1, options.interval))
        return 0
    console = Console(highlight=False, width=None if is_terminal else WIDTH, force_terminal=is_terminal)
    console.print(Screen(watch.look(), live=False, height=HEIGHT))
    return 0


def _watch(watch: RunWatch, console: Console, interval_s: float) -> None:
    """Show the run until a key, a signal or the end of the terminal ends it; the terminal is as before afterwards."""
    from rich.live import Live

    from megarl.cli.top.screen import Screen

    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        first = Screen(watch.look(), live=True)
        with Keys() as keys, Live(first, console=console, screen=True, auto_refresh=False) as live:
            while not END_KEYS & set(keys.wait(interval_s)):
                live.update(Screen(watch.look(), live=True), refresh=True)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        return


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
