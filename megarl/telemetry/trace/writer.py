"""Writes the events of one process from a thread. Callers never wait: events that it cannot write in time are lost.

`record` only appends to a bounded queue. The thread encodes the events and appends them to the rotating files of the
process, in one write per stream. Events lost because the disk is slow, full or unreachable are counted, and the count
is itself an event.
"""

import contextlib
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import msgspec

from megarl.common.clocks import RateLimit
from megarl.common.rundir.rotating_lines import PARTS, delete_oldest
from megarl.telemetry.trace.files import event_files
from megarl.telemetry.trace.kinds import STREAMS, EventStream, kind_of
from megarl.telemetry.trace.lines import SCHEMA, EventFileName, EventLine, EventPlace, Header, Scalar

# Writes the event files of a process: parts of bounded size, of which the oldest are deleted.

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


logger = logging.getLogger(__name__)

MOST_WAITING = 16_384  # events: some seconds of a busy controller
FLUSH_S = 1.0  # between two writes
COMPLAIN_S = 60.0
LOST = "events_lost"
# Of the bytes of a process, by stream. The few `rare` events must not be pushed out by the others.
SHARES: dict[EventStream, float] = {"rare": 0.05, "steps": 0.45, "details": 0.50}

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class EventClock:
    """The clocks of a process: `monotonic` in seconds, the others in nanoseconds, paired in a header."""

    monotonic: Callable[[], float] = time.monotonic
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    wall_ns: Callable[[], int] = time.time_ns


class EventWriter:
    """Takes the events of a process from any thread, and writes them in order."""

    def __init__(self, run_dir: Path, process: str, most_bytes: int, clock: EventClock | None = None) -> None:
        """`most_bytes`: of all event files of this process. Nothing is opened yet."""
        self.process = process
        self._clock = clock or EventClock()
        start_ms = self._clock.wall_ns() // 1_000_000
        self._files: dict[EventStream, PartWriter] = {
            stream: PartWriter(
                run_dir, EventFileName(process, start_ms, stream, 0), int(most_bytes * SHARES[stream]), self._header
            )
            for stream in STREAMS
        }
        self._waiting: deque[tuple[EventStream, EventLine]] = deque()
        self._count = threading.Lock()
        self.lost = self._reported = 0
        self._complaints = RateLimit(COMPLAIN_S)
        self._wake, self._closing = threading.Event(), False
        self._thread: threading.Thread | None = None

    def record(
        self, name: str, begin: float, end: float | None = None, *, args: Mapping[str, Scalar] | None = None,
        **place: Unpack[EventPlace],
    ) -> None:  # fmt: skip
        """Record a span from `begin` to `end`, or a mark at `begin`; both in seconds of `time.monotonic`.

        Raises UndeclaredEvent.
        """
        stream = kind_of(name).stream
        waiting = len(self._waiting)
        if waiting >= MOST_WAITING:
            self._lose(1)
            return
        us = 0 if end is None or end < begin else int((end - begin) * 1e6 + 0.5)
        at = int(begin * 1e6 + 0.5)
        self._waiting.append((stream, EventLine(name, at, us, args=args or None, **place)))
        if stream == "rare" or waiting == MOST_WAITING // 2:
            self._wake.set()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="write-events", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write waiting events and end the thread; False if that takes longer, and the rest is lost."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            self.flush()
        self.flush()
        for files in self._files.values():
            files.close()

    def flush(self) -> None:
        """Write waiting events. Called by the thread; raises nothing."""
        try:
            self._flush()
        except Exception:
            logger.exception("events could not be written")

    def _flush(self) -> None:
        parts: dict[EventStream, list[bytes]] = {}
        for _ in range(len(self._waiting)):
            stream, line = self._waiting.popleft()
            parts.setdefault(stream, []).append(_ENCODER.encode(line) + b"\n")
        for stream, lines in parts.items():
            self._append(stream, lines)
        self._report_lost()

    def _append(self, stream: EventStream, lines: list[bytes]) -> None:
        try:
            self._files[stream].append(b"".join(lines))
        except OSError as error:
            self._lose(len(lines))
            if self._complaints.allows():
                logger.warning("%d events are lost: %s", len(lines), error)

    def _lose(self, count: int) -> None:
        with self._count:
            self.lost += count

    def _report_lost(self) -> None:
        """Write the number of lost events if it has grown."""
        if (lost := self.lost) == self._reported:
            return
        line = EventLine(LOST, round(self._clock.monotonic() * 1e6), args={"count": lost})
        with contextlib.suppress(OSError):  # the next flush tries again
            self._files["rare"].append(_ENCODER.encode(line) + b"\n")
            self._reported = lost

    def _header(self) -> bytes:
        before = self._clock.monotonic_ns()
        wall = self._clock.wall_ns()
        between = (before + self._clock.monotonic_ns()) // 2
        return _ENCODER.encode(Header(SCHEMA, self.process, platform.node(), os.getpid(), wall, between)) + b"\n"
