"""Single keys from a terminal, without waiting for the end of a line; the terminal is as before afterwards."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any


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
