"""The progress of a conversion in bytes: one live line on a terminal, elsewhere a plain line every 10 s."""

from __future__ import annotations

import time
from typing import TextIO

from megarl.telemetry.metrics.progress import duration

_LIVE_S, _PLAIN_S = 0.2, 10.0  # seconds between two lines


def size(count: float) -> str:
    """Format a number of bytes, e.g. as 1.50 GB (powers of ten)."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:.0f} B"


class ByteProgress:
    """Writes how many bytes of `total` are done, with speed and remaining time; `start` bytes were done before."""

    def __init__(self, stream: TextIO, title: str, total: int, start: int = 0) -> None:
        self._stream, self._title, self._total = stream, title, total
        self._done = self._start = start
        self._began = self._written = time.monotonic()
        self._tty = stream.isatty()

    def add(self, count: int) -> None:
        """Count `count` more bytes as done."""
        self._done += count
        now = time.monotonic()
        if now - self._written >= (_LIVE_S if self._tty else _PLAIN_S):
            self._written = now
            self._stream.write(f"\r\x1b[2K{self._line(now)}" if self._tty else f"{self._line(now)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Remove the live line."""
        if self._tty:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

    def _line(self, now: float) -> str:
        speed = (self._done - self._start) / max(now - self._began, 1e-3)
        left = duration((self._total - self._done) / speed) if speed else "-"
        share = 100 * self._done / self._total if self._total else 100
        return f"{self._title}: {size(self._done)} of {size(self._total)} ({share:.0f}%), {size(speed)}/s, {left} left"
