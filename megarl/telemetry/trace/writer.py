"""Writes the events of one process from a thread. Callers never wait: events that it cannot write in time are lost.

`record` only appends to a bounded queue. The thread encodes the events and appends them to the rotating files of the
process, in one write per stream. Events lost because the disk is slow, full or unreachable are counted, and the count
is itself an event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import msgspec

from megarl.common.clocks import RateLimit
from megarl.telemetry.trace.kinds import STREAMS, EventStream, kind_of
from megarl.telemetry.trace.lines import SCHEMA, EventFileName, EventLine, EventPlace, Header, Scalar
from megarl.telemetry.trace.parts import PartWriter

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
