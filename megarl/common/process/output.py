"""Redirects everything that a process and its libraries print to a log file, which never grows without bound.

File descriptors 1 and 2 are redirected, not only `sys.stdout`, because NCCL, gloo and vLLM write from C++. A log or a
terminal that takes no more bytes (a full disk, a closed connection) costs these bytes, and never the run.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A larger log is copied to LOG.1, replacing an older copy, and restarted.
LOG_BYTES = 256 << 20


class LossyFile(io.RawIOBase):
    """Writes to a descriptor, and drops what it cannot write. `before` is called before each write."""

    def __init__(self, descriptor: int, before: Callable[[], None] = lambda: None) -> None:
        self._descriptor, self._before = descriptor, before
        self.lost_bytes = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, for libraries that write to it themselves."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        """Write `data`; return its length, also if it was dropped."""
        self._before()
        content = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError:
            self.lost_bytes += len(content) - written
        return len(content)


class RotatingLog:
    """The log file behind descriptors 1 and 2 of this process, and of the children that have inherited them."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self.path, self._limit, self._next = path, limit, limit

    def open(self) -> None:
        """Let both descriptors append to the file. Raises OSError."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def rotate_if_large(self) -> None:
        """Copy the file to LOG.1 and empty it if it has become too large. What is written meanwhile may be lost.

        It stays the same file, because children write to it too. If the copy fails, writing continues, and the next
        attempt comes after as many bytes again.
        """
        with suppress(OSError):
            size = os.fstat(1).st_size
            if size > self._next:
                self._next = size + self._limit
                shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
                os.ftruncate(1, 0)  # all append, so the next bytes are the first
                self._next = self._limit


def redirect_output(log_file: Path) -> TextIO:
    """Append this process's stdout, stderr and logging to `log_file`; return a stream to the previous stderr."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = _text(LossyFile(os.dup(2)))
    log = RotatingLog(log_file)
    log.open()
    sys.stdout = _text(LossyFile(1, log.rotate_if_large))
    sys.stderr = _text(LossyFile(2, log.rotate_if_large))
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    return terminal


def _text(raw: LossyFile) -> TextIO:
    """Return a stream of text to `raw` that is flushed after each line."""
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)
