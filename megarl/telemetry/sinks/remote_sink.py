"""Sends metrics to a service from a thread, so a slow or dead service never delays or ends a training step.

Records that the service does not accept wait in memory and are resent after a pause; if there are too many, the oldest
are lost. Every failure is reported to the caller's function, which counts it.
"""

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from megarl.common.files import write_json
from megarl.common.rundir.run_files import Status

logger = logging.getLogger(__name__)

MOST_WAITING = 1024  # records; one of 200 metrics takes about 40 KB
MOST_AT_ONCE = 32  # records per send
GATHER_S = 5.0  # between two sends, because a request costs as much as a record
LONGEST_PAUSE_S = 60.0  # each failure doubles the pause up to this
SLOW_S = 120.0  # a send that takes longer is reported


@dataclass(frozen=True)
class Record:
    """The metrics of one call of `write`. `wall_time`: when it was made, in Unix seconds."""

    step: int
    wall_time: float
    values: Mapping[str, float]


class LostRecords(RuntimeError):  # noqa: N818
    """Records did not reach the service, and never will."""


class RemoteSink:
    """A sink for a service, which a subclass calls. `write` and `roll_back` return at once, `close` within its bound.

    One thread calls `send` and `finish`, which may block, and may raise anything.
    """

    name: str

    def __init__(self, close_s: float, *, most_waiting: int = MOST_WAITING, gather_s: float = GATHER_S) -> None:
        """`close_s`: seconds in which `close` sends the rest. `gather_s`: seconds between two sends."""
        self.status: Status | None = None  # how the run ended, if known
        self.report: Callable[[Exception], None] = lambda error: None  # called by any thread with each failure
        self._close_s, self._most, self._gather_s = close_s, most_waiting, gather_s
        self._lock = threading.Lock()
        self._waiting: deque[Record] = deque()
        self._closing = threading.Event()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"send-to-{self.name}", daemon=True)

    def send(self, records: Sequence[Record]) -> None:
        """Send records in order. After a failure they are sent again, although some may have arrived.

        Raises LostRecords if resending cannot help.
        """
        raise NotImplementedError

    def finish(self, status: Status | None) -> None:
        """Report how the run ended. None: nothing was recorded, so the run failed."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of a step until they are sent."""
        with self._lock:
            lost = self._waiting.popleft() if len(self._waiting) >= self._most else None
            self._waiting.append(Record(step, time.time(), dict(values)))
            if not self._thread.ident:
                self._thread.start()
        if lost is not None:
            self.report(LostRecords(f"{self._most} records are already waiting; those of step {lost.step} are lost"))
        elif (since := self._busy_since) is not None and time.monotonic() - since > SLOW_S:
            self.report(TimeoutError(f"no answer for {time.monotonic() - since:.0f} s"))

    def roll_back(self, step: int) -> None:
        """Do nothing: sent records stay, and the repeated steps follow them."""

    def close(self) -> None:
        """Send the rest and how the run ended, within `close_s`. Reports records that could not be sent."""
        self._closing.set()
        if not self._thread.ident:
            self._thread.start()
        self._thread.join(self._close_s)
        left = len(self._waiting)
        if self._thread.is_alive():
            self.report(LostRecords(f"no answer for {self._close_s:.0f} s at the end of the run; {left} records left"))
        elif left:
            self.report(LostRecords(f"{left} records were not accepted before the end of the run"))

    def _run(self) -> None:
        pause_s = self._gather_s
        while not self._closing.wait(pause_s):
            pause_s = self._gather_s if self._send_waiting() else min(2 * pause_s, LONGEST_PAUSE_S)
        self._send_waiting()
        self._attempt(partial(self.finish, self.status))

    def _send_waiting(self) -> bool:
        """Send all waiting records; False if the service did not accept them."""
        while True:
            with self._lock:
                records = list(islice(self._waiting, MOST_AT_ONCE))
            if not records:
                return True
            if not self._attempt(partial(self.send, records)):
                return False
            sent = set(map(id, records))
            with self._lock:
                while self._waiting and id(self._waiting[0]) in sent:  # `write` may have dropped the first ones
                    self._waiting.popleft()

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Run `action`, and report its failure. Return False if it should be retried."""
        self._busy_since = time.monotonic()
        try:
            action()
        except Exception as error:
            logger.warning("%s", self.name, exc_info=True)
            self.report(error)
            return isinstance(error, LostRecords)
        finally:
            self._busy_since = None
        return True


def own_id(path: Path) -> str:
    """Return the id of a run in a service. The first start chooses it and writes it to `path`."""
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(8)})
    return str(json.loads(path.read_text())["id"])
