"""Writes the events of one process from a thread of its own. Nobody waits for it: what it cannot keep up with is lost.

`record` only appends to a bounded queue. The thread encodes what has come, leaves out what is too much for the space
(`event_budget.py`), and appends the rest to the files of the process in one write per stream. What is lost, because the
disk is slow, full or away, is counted, and the count is an event itself.
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

import msgspec

from megarl.common.rate_limit import RateLimit
from megarl.telemetry.event_budget import CONTROLLER, Allowance, WritingProcesses, daily_bytes
from megarl.telemetry.event_kinds import STREAMS, EventStream, kind_of
from megarl.telemetry.event_lines import SCHEMA, EventFileName, EventLine, Header, Scalar
from megarl.telemetry.event_parts import PartWriter, tidy

logger = logging.getLogger(__name__)

MOST_WAITING = 16_384  # events, those of some seconds of a busy controller
FLUSH_S = 1.0  # between two writes
TIDY_S = 60.0  # between two deletions of old files, by the controller
COMPLAIN_S = 60.0
LOST = "events_lost"

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class EventClock:
    """The clocks of a process; all in seconds but `monotonic_ns` and `wall_ns`, which a header pairs."""

    monotonic: Callable[[], float] = time.monotonic
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    wall_ns: Callable[[], int] = time.time_ns


@dataclass
class _StreamOut:
    """One stream of the process: its files, and what it may write."""

    files: PartWriter
    allowance: Allowance


class EventWriter:
    """Takes the events of a process, from any thread, and writes them in the order in which they come."""

    def __init__(
        self, run_dir: Path, process: str, processes: WritingProcesses, budget: int, clock: EventClock | None = None
    ) -> None:
        """`budget`: bytes of all event files of the run; `processes`: those that share it. Nothing is opened yet."""
        self.process, self._run_dir, self._budget = process, run_dir, budget
        self._clock = clock or EventClock()
        now, start_ms = self._clock.monotonic(), self._clock.wall_ns() // 1_000_000
        daily = daily_bytes(budget, processes, process)
        self._out: dict[EventStream, _StreamOut] = {
            stream: _StreamOut(
                PartWriter(run_dir, EventFileName(process, start_ms, stream, 0), daily[stream], self._header),
                Allowance(daily[stream], now),
            )
            for stream in STREAMS
        }
        self._place: dict[str, tuple[EventStream, Allowance]] = {}  # by the name of an event
        self._waiting: deque[tuple[EventStream, bool, EventLine]] = deque()
        self._count = threading.Lock()
        self.lost = self._told = 0
        self._complaints = RateLimit(COMPLAIN_S)
        self._tidied = now - TIDY_S
        self._wake, self._closing = threading.Event(), False
        self._thread: threading.Thread | None = None

    def record(
        self, name: str, begin: float, end: float | None = None, *, key: int | None = None,
        step: int | None = None, version: int | None = None, group: int | None = None, sample: int | None = None,
        replica: int | None = None, args: Mapping[str, Scalar] | None = None,
    ) -> None:  # fmt: skip
        """Record a span from `begin` to `end`, or a mark at `begin`; both in seconds of `time.monotonic`.

        `key`: the event is left out together with all of this key if the space is short; None: only if none is left.
        Raises UndeclaredEvent.
        """
        stream, allowance = self._place.get(name) or self._find(name)
        one_in = 1
        if key is not None:
            if not allowance.keeps(key):
                return
            one_in = allowance.one_in
        waiting = len(self._waiting)
        if waiting >= MOST_WAITING:
            self._lose(1)
            return
        us = 0 if end is None or end < begin else int((end - begin) * 1e6 + 0.5)
        at = int(begin * 1e6 + 0.5)
        line = EventLine(name, at, us, step, version, group, sample, replica, one_in, args or None)
        self._waiting.append((stream, key is None, line))
        if stream == "rare" or waiting == MOST_WAITING // 2:
            self._wake.set()

    def wants(self, name: str, key: int) -> bool:
        """Tell whether an event with this key would be kept now. Raises UndeclaredEvent."""
        return (self._place.get(name) or self._find(name))[1].keeps(key)

    def _find(self, name: str) -> tuple[EventStream, Allowance]:
        """Return the stream of an event and what it may write, and keep both for the next one. See `wants`."""
        stream = kind_of(name).stream
        found = self._place[name] = (stream, self._out[stream].allowance)
        return found

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="write-events", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write what waits and end the thread; False if that takes longer: the rest is lost then."""
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
        for each in self._out.values():
            each.files.close()

    def flush(self) -> None:
        """Write what waits. The thread calls it; nothing is raised."""
        try:
            self._flush()
        except Exception:
            logger.exception("events could not be written")

    def _flush(self) -> None:
        now = self._clock.monotonic()
        parts: dict[EventStream, list[bytes]] = {}
        for each in self._out.values():
            each.allowance.refill(now)
        for _ in range(len(self._waiting)):
            stream, always, line = self._waiting.popleft()
            self._encode(stream, always, line, now, parts)
        for stream, lines in parts.items():
            self._append(stream, lines)
        self._tell_lost(now)
        if self.process == CONTROLLER and now - self._tidied >= TIDY_S:
            self._tidied = now
            tidy(self._run_dir, self._budget, self._clock.wall_ns() / 1e9)

    def _encode(
        self, stream: EventStream, always: bool, line: EventLine, now: float, parts: dict[EventStream, list[bytes]]
    ) -> None:
        data = _ENCODER.encode(line) + b"\n"
        if self._out[stream].allowance.spend(len(data), now):
            parts.setdefault(stream, []).append(data)
        elif always:
            self._lose(1)

    def _append(self, stream: EventStream, lines: list[bytes]) -> None:
        try:
            self._out[stream].files.append(b"".join(lines))
        except OSError as error:
            self._lose(len(lines))
            if self._complaints.allows():
                logger.warning("%d events are lost: %s", len(lines), error)

    def _lose(self, count: int) -> None:
        with self._count:
            self.lost += count

    def _tell_lost(self, now: float) -> None:
        """Write how many events were lost, if there are more than the files say."""
        if self.lost == self._told:
            return
        lost = self.lost
        line = EventLine(LOST, round(now * 1e6), args={"count": lost})
        data = _ENCODER.encode(line) + b"\n"
        if self._out["rare"].allowance.spend(len(data), now):
            with contextlib.suppress(OSError):  # the next flush tries again
                self._out["rare"].files.append(data)
                self._told = lost

    def _header(self) -> bytes:
        before = self._clock.monotonic_ns()
        wall = self._clock.wall_ns()
        between = (before + self._clock.monotonic_ns()) // 2
        return _ENCODER.encode(Header(SCHEMA, self.process, platform.node(), os.getpid(), wall, between)) + b"\n"
