"""How far a conversion is: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from megarl.telemetry.progress import duration

_LIVE_S, _PLAIN_S = 0.2, 10.0


def size(count: float) -> str:
    """Bytes as 1.5 GB (powers of ten)."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return f"{count:.0f} B"


class ByteProgress:
    """`done` bytes of `total`, with speed and the time left; `start` of them were there before."""

    def __init__(self, stream: TextIO, title: str, total: int, start: int = 0) -> None:
        self._stream, self._title, self._total = stream, title, total
        self._done = self._start = start
        self._began = self._said = time.monotonic()
        self._tty = stream.isatty()

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        self._done += count
        now = time.monotonic()
        if now - self._said >= (_LIVE_S if self._tty else _PLAIN_S):
            self._said = now
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
