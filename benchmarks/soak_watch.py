"""Watches a run from outside: its steps, its processes and what it tells, and notes the faults that happen to it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_happened import Happened  # noqa: E402
from soak_kinds import Fault  # noqa: E402
from soak_place import OneMachine, RunPlace  # noqa: E402
from soak_processes import Replica, restarts_among  # noqa: E402
from soak_variant import checkpoints_of, orders_of  # noqa: E402

from megarl.common.line_parts import read_lines  # noqa: E402

WENT_ON = "in whose place a new one is started"  # told by the controller of each replica that a publication leaves out


class WatchedRun:
    """Watches one run until `end` is set, because the run has ended, and holds the faults that have happened to it.

    `replicas`: how many it has. `log`: the output of the job.
    """

    POLL_S: ClassVar[float] = 0.2
    FIND_S: ClassVar[float] = 60.0  # for a process whose title is just being changed, or that is being started
    RECOVER_S: ClassVar[float] = 300.0  # for what was lost, until it is there again and the run goes on
    NOTICE_S: ClassVar[float] = 120.0  # for a run that goes on after a replica was slow

    def __init__(
        self,
        run_dir: Path,
        faults: Sequence[Fault],
        *,
        replicas: int,
        say: Callable[[str], None],
        end: threading.Event,
        place: RunPlace | None = None,
    ) -> None:
        """`place`: where it runs; None: on this machine."""
        self.happened: list[Happened] = []
        self.run_dir, self.replicas, self.say, self.end = run_dir, replicas, say, end
        self._place = place or OneMachine()
        self.orders, self.log = orders_of(run_dir), run_dir.with_suffix(".log")
        self.checkpoints = checkpoints_of(run_dir, [fault.kind for fault in faults])
        self._begun = time.monotonic()

    # --- faults

    def begin(self, fault: Fault, pid: int, note: str, *, busy: bool = False) -> Happened:
        """Note that a fault happens now, and tell it."""
        event = Happened(fault, pid, self.step, self.seconds, busy=busy, notes=[note])
        event.told_before, event.left_out_before = self.told(fault.kind.told), self.left_out
        self.happened.append(event)
        self.say(f"step {event.step}: {fault} (pid {pid}), {note}")
        return event

    def found(self, fault: Fault, look: Callable[[], object]) -> bool:
        """Wait until `look` finds what a fault is to hit; tell it if there is none."""
        if self.wait(lambda: bool(look()), self.FIND_S) and not self.end.is_set():
            return True
        self.say(f"{fault}: no process was found")
        return False

    # --- processes

    def find_replicas(self) -> dict[int, Replica]:
        """Return the replicas that have an engine, by number."""
        return self._place.find_replicas(self.run_dir)

    def find_processes(self, target: str) -> list[psutil.Process]:
        """Return the processes of a part of the run that is no replica."""
        return self._place.find_processes(self.run_dir, target)

    def find_agent(self) -> psutil.Process | None:
        """Return the process that has started the ranks."""
        return self._place.find_agent(self.run_dir)

    @property
    def restarts(self) -> int:
        """The number of times that torchrun has restarted the ranks since its start; 0 if no rank runs."""
        made = restarts_among(self.find_processes("rank"))
        return 0 if made is None else made[0]

    @property
    def restarts_left(self) -> int:
        """The number of times that torchrun may still restart the ranks; 0 if no rank runs."""
        made = restarts_among(self.find_processes("rank"))
        return 0 if made is None else made[1]

    @property
    def complete(self) -> bool:
        """True if all replicas have an engine."""
        return len(self.find_replicas()) == self.replicas

    # --- steps, and what is told

    @property
    def seconds(self) -> float:
        """Seconds since the watch has begun."""
        return time.monotonic() - self._begun

    @property
    def records(self) -> list[dict[str, Any]]:
        """The steps that the run has recorded."""
        return read_so_far(self.run_dir)

    @property
    def step(self) -> int:
        """The number of steps that the run has recorded."""
        return len(self.records)

    def sum(self, metric: str, since: int) -> float:
        """Return the sum of a metric over the steps after step `since`."""
        return sum(record.get(metric) or 0.0 for record in self.records[since:])

    def told(self, text: str) -> int:
        """Return how often the run has told a text on the terminal and in the logs of its agent workers."""
        return sum(_count(log, text) for log in [self.log, *(self.run_dir / "logs").glob("worker-*.log")])

    def has_told(self, event: Happened) -> bool:
        """Tell whether the run has told of a fault as its kind says."""
        told = event.fault.kind.told
        return not told or self.told(told) > event.told_before

    @property
    def left_out(self) -> int:
        """The number of times that a publication has gone on without a replica that it has found lost."""
        return _count(self.run_dir / "logs" / "controller.log", WENT_ON)

    # --- waits

    def wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a condition; False if the run ends before, or `timeout_s` has passed (None: the run's own end)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            if self.end.wait(self.POLL_S) or (deadline is not None and time.monotonic() > deadline):
                return condition()
        return True

    def notices(self, condition: Callable[[], bool]) -> bool:
        """Wait for what shows that the run has noticed a fault."""
        return self.wait(condition, self.NOTICE_S)

    def recovers(self, condition: Callable[[], bool]) -> bool:
        """Wait for what shows that the run is over a fault."""
        return self.wait(condition, self.RECOVER_S)

    def goes_on(self) -> bool:
        """Wait until two more steps are done."""
        since = self.step
        return self.notices(lambda: self.step >= since + 2)


def _count(log: Path, text: str) -> int:
    """Return how often a log has a text; 0 if there is no log, or no text."""
    return log.read_text(encoding="utf-8", errors="replace").count(text) if text and log.is_file() else 0


def read_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps that a living run has recorded; a line that is being written is left out."""
    try:
        return [record for record in map(json.loads, read_lines(run_dir / "metrics.jsonl")) if "time/step" in record]
    except OSError:  # a part has just become an older one
        return []
