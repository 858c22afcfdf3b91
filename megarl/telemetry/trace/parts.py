"""Writes the event files of a process: parts of bounded size, of which the oldest are deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megarl.common.rundir.rotating_lines import PARTS, delete_oldest
from megarl.telemetry.trace.files import event_files
from megarl.telemetry.trace.lines import EventFileName

LEAST_PART_BYTES = 4096


class PartWriter:
    """Appends lines to one stream of a process, and begins a new file when the current one is full.

    Deletes the oldest files of the process and stream, including those of earlier starts. Begins a new file if the
    current one was moved or deleted because another run took the directory. Methods wait only for the disk.
    """

    def __init__(
        self, run_dir: Path, name: EventFileName, most_bytes: int, header: Callable[[], bytes]
    ) -> None:  # fmt: skip
        """`name`: of the first file. `most_bytes`: of all parts. `header`: returns the first line of each file."""
        self._run_dir, self._name, self._header = run_dir, name, header
        self._limit = max(LEAST_PART_BYTES, most_bytes // PARTS)
        self._file: int | None = None
        self._size = 0
        self._torn = False

    def append(self, lines: bytes) -> None:
        """Write complete lines. If it raises OSError, they are lost, but later lines are not."""
        if self._file is not None and not self._is_there():
            self.close()
        if self._file is None:
            self._open()
        data = b"\n" + lines if self._torn else lines  # ends a partial line of an earlier write
        self._torn = True
        self._write(data)
        self._torn = False
        if self._size >= self._limit:
            self.close()

    def close(self) -> None:
        """Close the current file; the next lines begin another one."""
        if self._file is not None:
            file, self._file = self._file, None
            self._name = self._name._replace(number=self._name.number + 1)
            os.close(file)

    def _open(self) -> None:
        """Begin a new file; skip names taken by a process that started at the same time."""
        path = self._name.path(self._run_dir)
        path.parent.mkdir(exist_ok=True)
        while True:
            try:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                break
            except FileExistsError:
                self._name = self._name._replace(start_ms=self._name.start_ms + 1)
                path = self._name.path(self._run_dir)
        self._file, self._size, self._torn = file, 0, False
        self._delete_oldest()
        try:
            self._write(self._header())
        except OSError:
            self.close()  # without a header the file could not be read
            raise

    def _delete_oldest(self) -> None:
        """Make room for a full part. A failure of the file system only costs space."""
        with suppress(OSError):
            own = [each for each in event_files(self._run_dir) if (each.process, each.stream) == self._name[::2]]
            delete_oldest([each.path(self._run_dir) for each in own if each != self._name], self._limit * (PARTS - 1))

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        left = memoryview(data)
        while left:
            written = os.write(self._file, left)
            self._size += written
            left = left[written:]

    def _is_there(self) -> bool:
        """Return whether the open file is still at its path."""
        assert self._file is not None
        try:
            found, own = os.stat(self._name.path(self._run_dir)), os.fstat(self._file)
        except FileNotFoundError:
            return False
        return (found.st_ino, found.st_dev) == (own.st_ino, own.st_dev)
