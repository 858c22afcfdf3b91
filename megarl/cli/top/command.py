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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.standalone import ANY_STOP, interrupted_once

if TYPE_CHECKING:
    from rich.console import Console

    from megarl.cli.top.run_view import RunWatch

WIDTH = 100  # characters without a terminal
HEIGHT = 60  # lines of `--once`, and without a terminal
START_S = 60  # longest wait for the directory of a run that has just started
END_KEYS = set("qQ\x03\x04")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top` to the `megarl` command."""
    top = commands.add_parser(
        "top",
        help="show a run in the terminal: progress, reward, throughput, waiting, lag, engines, faults, notices",
        description="Show a running or finished run from the files of its directory, on any host that has them. "
        "Nothing is written there, and the run is not disturbed. q or Ctrl-C ends it.",
    )
    top.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of the run")
    top.add_argument("--once", action="store_true", help="print one frame; the default without a terminal")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds per look (default: %(default)s)")
    top.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the run; return the exit status. Raises FileNotFoundError if there is none."""
    from rich.console import Console

    from megarl.cli.top.run_view import RunWatch
    from megarl.cli.top.screen import Screen

    is_terminal = sys.stdout.isatty()
    if is_terminal and not options.once:
        _wait_for(options.run_dir)
    watch = RunWatch(options.run_dir)
    if is_terminal and not options.once:
        _watch(watch, Console(highlight=False), max(0.1, options.interval))
        return 0
    console = Console(highlight=False, width=None if is_terminal else WIDTH, force_terminal=is_terminal)
    console.print(Screen(watch.look(), live=False, height=HEIGHT))
    return 0


def _wait_for(run_dir: Path) -> None:
    """Wait for the directory of a run that has just started."""
    for second in range(START_S):
        if run_dir.is_dir():
            return
        if second == 0:
            sys.stderr.write(f"megarl: waiting at most {START_S} s for {run_dir}; Ctrl-C ends it\n")
        time.sleep(1)


def _watch(watch: RunWatch, console: Console, interval_s: float) -> None:
    """Show the run until a key, a signal or the end of the terminal ends it; then restore the terminal."""
    from rich.live import Live

    from megarl.cli.top.screen import Screen

    try:
        with interrupted_once((*ANY_STOP, signal.SIGHUP)):
            first = Screen(watch.look(), live=True)
            with _keys() as pressed, Live(first, console=console, screen=True, auto_refresh=False) as live:
                while not END_KEYS & set(pressed(interval_s)):
                    live.update(Screen(watch.look(), live=True), refresh=True)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that returns pressed keys as soon as there are any, or nothing after the given seconds.

    It raises EOFError when the terminal is gone. Without a terminal at stdin there are no keys.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield _nothing_after
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(seconds: float) -> str:
        if not select.select([file], [], [], seconds)[0]:
            return ""
        if not (keys := os.read(file, 256)):
            raise EOFError
        return keys.decode(errors="replace")

    try:
        tty.setcbreak(file)  # keys come without waiting for the end of a line
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _nothing_after(seconds: float) -> str:
    time.sleep(seconds)
    return ""
