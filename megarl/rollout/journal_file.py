"""A file of records that is only appended to, and read again after a crash. A record is bytes; nothing is unpickled.

Each record is preceded by its length and its CRC-32. What a killed process, or a full disk, left at the end does not
match them: it is ignored, and cut off before the next record is written.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_FRAME = struct.Struct("<QI")  # length of the record in bytes, CRC-32


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
        self.size = 0  # bytes of complete records
        self._lock = threading.RLock()

    def read(self) -> list[bytes]:
        """Return all complete records; [] if there is no file. Raises OSError if it cannot be read."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    records = list(read_records(file))
            except FileNotFoundError:
                records = []
            self.size = sum(_FRAME.size + len(record) for record in records)
            return records

    def clear(self) -> None:
        """Begin an empty file with the next record."""
        self.size = 0

    def append(self, records: Iterable[bytes]) -> None:
        """Write records after those that `read` returned or that were written since, to the disk.

        Raises OSError if that fails; then none of them is in the file.
        """
        with self._lock:
            content = b"".join(map(framed, records))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                # The file may have been moved aside, and this is a new one.
                self.size = min(self.size, os.fstat(file.fileno()).st_size)
                file.truncate(self.size)  # removes what is incomplete
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self.size += len(content)

    @property
    def moved(self) -> bool:
        """True if records were written, and the file is gone."""
        return self.size > 0 and not self.path.exists()

    def tidy(self, visit: Callable[[bytes], None], chosen: Callable[[bytes], bool]) -> None:
        """Do `scan`, then `keep`, with nothing in between."""
        with self._lock:
            self.scan(visit)
            self.keep(chosen)

    def scan(self, visit: Callable[[bytes], None]) -> None:
        """Show every complete record to `visit`, one at a time. Raises OSError if the file cannot be read."""
        with self._lock:
            if self.path.exists():
                with self.path.open("rb") as file:
                    for record in read_records(file):
                        visit(record)

    def keep(self, chosen: Callable[[bytes], bool]) -> None:
        """Remove the records that are not `chosen`. Raises OSError if that fails; then all of them are still there."""
        with self._lock:
            if not self.path.exists():
                return
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            size = 0
            try:
                with self.path.open("rb") as old, temporary.open("wb") as new:
                    for record in read_records(old):
                        if chosen(record):
                            size += new.write(framed(record))
                    new.flush()
                    os.fsync(new.fileno())
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
            self.size = size
