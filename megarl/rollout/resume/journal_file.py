"""An append-only file of records that survives a crash. A record is bytes; nothing is unpickled.

Each record is preceded by its length and its CRC-32. An incomplete record at the end, from a killed process or a full
disk, is ignored, and cut off before the next write. The first line, the head, is updated in place: it says how many
groups were ever started. A file of an earlier release has no head, and gets one when it is read.
"""

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
    """Return the number in the head of an open file and skip it; None, at the file's beginning, if there is no head."""
    found = _HEADS.fullmatch(file.read(_HEAD_BYTES))
    if found is None:
        file.seek(0)
        return None
    return int(found[1]) if found[1].isdigit() else 0


def groups_started(path: Path) -> int:
    """Return how many groups were ever started according to the journal at `path`, or 0. Raises OSError."""
    try:
        with path.open("rb") as file:
            return _read_head(file) or 0
    except FileNotFoundError:
        return 0


def framed(record: bytes) -> bytes:
    """Return a record with its length and checksum, as in the file."""
    return _FRAME.pack(len(record), zlib.crc32(record)) + record


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of an open file up to the first incomplete or damaged one."""
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
    """The file at `path`, which one process writes. Thread-safe: calls take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0  # bytes of the head and of complete records
        self._started = 0
        self._lock = threading.RLock()
        self._writing = threading.Lock()  # held for no longer than bytes take into the page cache

    def read(self) -> list[bytes]:
        """Return all complete records; [] without a file. Raises OSError if it cannot be read."""
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
        """Let the next record begin an empty file."""
        self.size = 0

    def count(self, started: int) -> None:
        """Write into the head how many groups were ever started. Raises OSError.

        It does not wait for a running write of records, because it is called before groups start. After the file was
        moved aside, a new head is written with the next record.
        """
        with self._writing:
            self._started = started
            if self.moved:
                return
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
                if _read_head(file) is not None or os.fstat(file.fileno()).st_size < _HEAD_BYTES:
                    os.pwrite(file.fileno(), _HEAD % started, 0)

    def append(self, records: Iterable[bytes]) -> None:
        """Write records to disk, after the complete ones. Raises OSError, and writes none, on failure."""
        with self._lock:
            content = b"".join(map(framed, records))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                with self._writing:
                    # This is a new file if the old one was moved aside.
                    self.size = min(self.size, os.fstat(file.fileno()).st_size)
                    file.truncate(self.size)  # removes an incomplete record
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
        """Call `visit` with every complete record, then do `keep`, atomically."""
        with self._lock:
            if self.path.exists():
                with self.path.open("rb") as file:
                    _read_head(file)
                    for record in read_records(file):
                        visit(record)
            self.keep(chosen)

    def keep(self, chosen: Callable[[bytes], bool]) -> None:
        """Remove the records that are not `chosen`. Raises OSError, and keeps all of them, on failure."""
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
