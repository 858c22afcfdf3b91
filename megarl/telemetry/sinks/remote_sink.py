"""Sends metrics to a service in a thread of its own, so that a slow or dead service delays and ends no training step.

What the service does not take waits in memory, is sent again after a pause, and of too much the oldest is lost. Every
failure is reported to the caller's function, which counts it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megarl.common.rundir.run_files import Status

logger = logging.getLogger(__name__)

MOST_WAITING = 1024  # records; one of 200 metrics takes about 40 KB
MOST_AT_ONCE = 32  # records that are sent together
FIRST_PAUSE_S = 1.0  # after a failure; doubles with each one up to the longest
LONGEST_PAUSE_S = 60.0
GATHER_S = 5.0  # between two sends, in which records are gathered: a request costs as much as a record
SLOW_S = 120.0  # after which a send that has not returned is reported


@dataclass(frozen=True)
class Record:
    """The metrics of one call of `write`. `wall_time`: when it was made, in Unix seconds."""

    step: int
    wall_time: float
    values: Mapping[str, float]


class Remote(Protocol):
    """A service. Its methods are called by one thread, may block, and may raise anything."""

    name: str

    def send(self, records: Sequence[Record]) -> None:
        """Send records in their order. After a failure the same ones are sent again, some of which may be there.

        Raises LostRecords if that would be in vain.
        """

    def finish(self, status: Status | None) -> None:
        """Say how the run ended. None: nothing was recorded, so it has failed."""


class LostRecords(RuntimeError):  # noqa: N818
    """Records have not reached the service, and will not."""


class RemoteSink:
    """A sink (`megarl.telemetry.sinks.sinks.Sink`) for a service. `write` and `roll_back` return at once, `close` in
    time."""

    def __init__(
        self, remote: Remote, close_s: float, most_waiting: int = MOST_WAITING, gather_s: float = 0.0
    ) -> None:  # fmt: skip
        """`close_s`: seconds in which `close` sends what is left. `gather_s`: between two sends of few records."""
        self.name = remote.name
        self.status: Status | None = None  # how the run ended, as far as it is known
        self._remote, self._close_s, self._most, self._gather_s = remote, close_s, most_waiting, gather_s
        self._report: Callable[[Exception], None] = lambda error: None
        self._changed = threading.Condition()
        self._waiting: deque[Record] = deque()
        self._closing = self._ended = False
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None

    def report_to(self, report: Callable[[Exception], None]) -> None:
        """Have `report` called, by any thread, with each failure."""
        self._report = report

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of a step until they are sent."""
        problem: Exception | None = None
        with self._changed:
            if len(self._waiting) >= self._most:
                lost = self._waiting.popleft()
                problem = LostRecords(f"{self._most} records wait already; those of step {lost.step} are lost")
            elif self._busy_since is not None and time.monotonic() - self._busy_since > SLOW_S:
                problem = TimeoutError(f"no answer for {time.monotonic() - self._busy_since:.0f} s")
            self._waiting.append(Record(step, time.time(), dict(values)))
            self._changed.notify_all()
            self._start()
        if problem is not None:
            self._report(problem)

    def roll_back(self, step: int) -> None:
        """Do nothing: what was sent stays, and is followed by the steps that are done again."""

    def close(self) -> None:
        """Send what is left and say how the run ended, in `close_s` at most. Reports what could not be sent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._start()
            self._changed.wait_for(lambda: self._ended, self._close_s)
            ended, left = self._ended, len(self._waiting)
        if not ended:
            self._report(LostRecords(f"no answer for {self._close_s:.0f} s at the end of the run; {left} records wait"))
        elif left:
            self._report(LostRecords(f"{left} records were not taken until the end of the run"))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"send-to-{self.name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        pause_s = gather_s = 0.0
        while True:
            with self._changed:
                if pause_s:
                    self._changed.wait_for(lambda: self._closing, pause_s)
                elif gather_s:
                    self._changed.wait_for(lambda: self._closing or len(self._waiting) >= MOST_AT_ONCE, gather_s)
                self._changed.wait_for(lambda: self._waiting or self._closing)
                closing = self._closing
                records = [self._waiting[index] for index in range(min(MOST_AT_ONCE, len(self._waiting)))]
            sent = not records or self._attempt(partial(self._remote.send, records))
            done = set(map(id, records)) if sent else set()
            with self._changed:
                while self._waiting and id(self._waiting[0]) in done:  # the first ones may have been given up meanwhile
                    self._waiting.popleft()
                last = closing and (not sent or not self._waiting)
            gather_s = self._gather_s
            pause_s = 0.0 if sent else min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            if last:
                self._attempt(partial(self._remote.finish, self.status))
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Do `action`, and report its failure. Return False if it should be done again."""
        with self._changed:
            self._busy_since = time.monotonic()
        try:
            action()
        except Exception as error:
            logger.warning("%s", self.name, exc_info=True)
            self._report(error)
            return isinstance(error, LostRecords)
        finally:
            with self._changed:
                self._busy_since = None
        return True
