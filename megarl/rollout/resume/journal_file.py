"""A file of records that is only appended to, and read again after a crash. A record is bytes; nothing is unpickled.

Each record is preceded by its length and its CRC-32. What a killed process, or a full disk, left at the end does not
match them: it is ignored, and cut off before the next record is written. The first line, the head, is written in place:
it says how many groups were ever started. A file of an earlier release has none, and gets one when it is read.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

_FRAME = struct.Struct("<QI")  # length of the record in bytes, CRC-32
_HEAD = b"megarl journal: %020d groups started\n"
_HEAD_BYTES = len(_HEAD % 0)
_HEADS = re.compile(rb"megarl journal: (.{20}) groups started\n", re.DOTALL)


def _read_head(file: BinaryIO) -> int | None:
    """Return the number in the head of an open file, and leave the file behind it; None, at its beginning, without."""
    found = _HEADS.fullmatch(file.read(_HEAD_BYTES))
    if found is None:
        file.seek(0)
        return None
    return int(found[1]) if found[1].isdigit() else 0


def groups_started(path: Path) -> int:
    """Return how many groups were ever started, by the journal at `path`; 0 without a record. Raises OSError."""
    try:
        with path.open("rb") as file:
            return _read_head(file) or 0
    except FileNotFoundError:
        return 0


def framed(record: bytes) -> bytes:
    """Return a record as it stands in the file."""
    return _FRAME.pack(len(record), zlib.crc32(record)) + record


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of an open file up to the first one that is incomplete or damaged."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    while left >= _FRAME.size:
        length, checksum = _FRAME.unpack(file.read(_FRAME.size))
        left -= _FRAME.size + length
        if left < 0:  # checked before the read, because a damaged length could be any number
            return
        record = file.read(length)
        if zlib.crc32(record) != checksum:
            return
        yield record


class JournalFile:
    """The file at `path`, which one process writes. Every method may be called from any thread; they take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0  # bytes of the head and of complete records
        self._started = 0
        self._lock = threading.RLock()
        self._writing = threading.Lock()  # held for no longer than bytes take into the page cache

    def read(self) -> list[bytes]:
        """Return all complete records; [] if there is no file. Raises OSError if it cannot be read."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    head, begin = _read_head(file), file.tell()
                    records = list(read_records(file))
            except FileNotFoundError:
                self.size = 0
                return []
            self._started = max(self._started, head or 0)
            self.size = begin + sum(_FRAME.size + len(record) for record in records)
            if head is None and records:
                try:
                    self.keep(lambda record: True)
                except OSError as error:
                    logger.warning("%s gets no head: %s", self.path, error)
            return records

    def clear(self) -> None:
        """Begin an empty file with the next record."""
        self.size = 0

    def count(self, started: int) -> None:
        """Write into the head how many groups were ever started. Raises OSError.

        It waits for no record that is being written: it is called before groups start. A file that was moved aside gets
        no new head before its next record.
        """
        with self._writing:
            self._started = started
            if self.moved:
                return
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
                if _read_head(file) is not None or os.fstat(file.fileno()).st_size < _HEAD_BYTES:
                    os.pwrite(file.fileno(), _HEAD % started, 0)

    def append(self, records: Iterable[bytes]) -> None:
        """Write records after those that `read` returned or that were written since, to the disk.

        Raises OSError if that fails; then none of them is in the file.
        """
        with self._lock:
            content = b"".join(map(framed, records))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                with self._writing:
                    # The file may have been moved aside, and this is a new one.
                    self.size = min(self.size, os.fstat(file.fileno()).st_size)
                    file.truncate(self.size)  # removes what is incomplete
                    content = content if self.size else _HEAD % self._started + content
                    file.write(content)
                    file.flush()
                os.fsync(file.fileno())
            self.size += len(content)

    @property
    def moved(self) -> bool:
        """True if records were written, and the file is gone."""
        return self.size > 0 and not self.path.exists()

    def tidy(self, visit: Callable[[bytes], None], chosen: Callable[[bytes], bool]) -> None:
        """Show every complete record to `visit`, one at a time; then do `keep`, with nothing in between."""
        with self._lock:
            if self.path.exists():
                with self.path.open("rb") as file:
                    _read_head(file)
                    for record in read_records(file):
                        visit(record)
            self.keep(chosen)

    def keep(self, chosen: Callable[[bytes], bool]) -> None:
        """Remove the records that are not `chosen`. Raises OSError if that fails; then all of them are still there."""
        with self._lock:
            if not self.path.exists():
                return
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            try:
                with self.path.open("rb") as old, temporary.open("wb") as new:
                    self._started = max(self._started, _read_head(old) or 0)
                    size = new.write(_HEAD % self._started)
                    for record in read_records(old):
                        if chosen(record):
                            size += new.write(framed(record))
                    new.flush()
                    os.fsync(new.fileno())
                    with self._writing:
                        os.pwrite(new.fileno(), _HEAD % self._started, 0)
                        temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
            self.size = size
