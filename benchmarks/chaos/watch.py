"""Watches a run from outside: its steps, its processes and what it prints, and notes the faults that happen to it."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from benchmarks.chaos.kinds import Fault, Happened
from benchmarks.chaos.processes import (
    Replica,
    cpu_seconds,
    find_agent,
    find_processes,
    find_replicas,
    is_stopped,
    restarts_among,
    send,
)
from megarl.common.rundir.rotating_lines import read_lines

_Found = TypeVar("_Found")


def orders_of(run_dir: Path) -> Path:
    """Return the directory in which orders are given (chaos/orders.py)."""
    return run_dir.with_suffix(".orders")


class WatchedRun:
    """Watches one run until `end` is set, because the run has ended, and holds the faults that have happened to it.

    `replicas`: how many it has. `log`: the output of the job.
    """

    POLL_S: ClassVar[float] = 0.2
    FIND_S: ClassVar[float] = 60.0  # for a process whose title is just being changed, or that is being started
    RECOVER_S: ClassVar[float] = 300.0  # until what was lost is back and the run continues
    NOTICE_S: ClassVar[float] = 120.0  # for a run that continues after a replica was slow

    def __init__(
        self,
        run_dir: Path,
        *,
        replicas: int,
        say: Callable[[str], None],
        end: threading.Event,
    ) -> None:
        self.happened: list[Happened] = []
        self.run_dir, self.replicas, self.say, self.end = run_dir, replicas, say, end
        self.orders, self.log = orders_of(run_dir), run_dir.with_suffix(".log")
        self.checkpoints = run_dir / "checkpoints"
        self._begun = time.monotonic()

    # --- faults

    def begin(self, fault: Fault, pid: int, note: str, *, busy: bool = False) -> Happened:
        """Note that a fault happens now, and print it."""
        event = Happened(fault, pid, self.step, self.seconds, busy=busy, notes=[note])
        event.printed_before = self.printed(fault.kind.printed)
        self.happened.append(event)
        self.say(f"step {event.step}: {fault} (pid {pid}), {note}")
        return event

    def found(self, fault: Fault, look: Callable[[], _Found | None]) -> _Found | None:
        """Wait until `look` finds the target of a fault, and return it; print a line if there is none."""
        found: _Found | None = None

        def there() -> bool:
            nonlocal found
            found = look()
            return found is not None

        if self.wait(there, self.FIND_S) and not self.end.is_set():
            return found
        self.say(f"{fault}: no process was found")
        return None

    # --- processes

    def find_replicas(self) -> dict[int, Replica]:
        """Return the replicas that have an engine, by number."""
        return find_replicas(self.run_dir)

    def find_processes(self, target: str) -> list[psutil.Process]:
        """Return the processes of a part of the run that is no replica."""
        return find_processes(self.run_dir, target)

    def find_agent(self) -> psutil.Process | None:
        """Return the process that has started the ranks."""
        return find_agent(self.run_dir)

    @property
    def restarts(self) -> int:
        """The number of times that torchrun has restarted the ranks since its start; 0 if no rank runs."""
        return restarts_among(self.find_processes("rank"))

    @property
    def complete(self) -> bool:
        """True if all replicas have an engine."""
        return len(self.find_replicas()) == self.replicas

    @property
    def all_serve(self) -> bool:
        """True if all replicas have served in the latest step."""
        return bool(self.records[-1].get("rollout/replicas_alive") == self.replicas)

    # --- steps, and what is printed

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

    def printed(self, text: str) -> int:
        """Return how often the run has printed a text on the terminal and in the logs of its agent workers."""
        return sum(_count(log, text) for log in [self.log, *(self.run_dir / "logs").glob("worker-*.log")])

    def has_printed(self, event: Happened) -> bool:
        """Return whether the run has printed the text of a fault's kind."""
        printed = event.fault.kind.printed
        return not printed or self.printed(printed) > event.printed_before

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


def _count(log: Path, text: str) -> int:
    """Return how often a log has a text; 0 if there is no log, or no text."""
    return log.read_text(encoding="utf-8", errors="replace").count(text) if text and log.is_file() else 0


def read_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps that a live run has recorded; a line that is being written is left out."""
    try:
        return [record for record in map(json.loads, read_lines(run_dir / "metrics.jsonl")) if "time/step" in record]
    except OSError:  # a part has just become an older one
        return []


WAIT_S = {"busy": 10.0, "idle": 30.0, "in-sync": 60.0}  # for the moment, before the fault comes all the same
# The notes of each moment, if it has not come in time and if it has.
MOMENT_NOTES = {
    "busy": ("it was idle", "it had requests"),
    "idle": ("it worked", "it was idle"),
    "in-sync": ("NOT in a publication", "in a publication"),
}
WATCH_S = 0.1  # half of the time for which an engine must not compute to be idle
GLANCE_S = 0.05  # for which one must compute to be busy: an engine that ends its last responses does not
BUSY_SHARE = 0.4  # of that time
IDLE_SHARE = 0.05  # of that time, in which an idle engine may compute
STOPPED_S = 2.0  # for an engine to stop, on a machine that has much to do
HELD_S = 0.1  # after which an engine that was stopped in a publication is seen to hold it up
POLL_S = 0.005  # shorter than a publication
TAIL_BYTES = 1 << 16  # of the schedule, which grows with the run


def catch(moment: str, engine: psutil.Process, run_dir: Path, over: Callable[[], bool]) -> bool:
    """Wait until an engine does what `moment` names; False if it does not in time, or the run is `over()`.

    An engine that is caught in a publication is stopped.
    """
    looks = {
        "busy": lambda engine: _generates(engine, run_dir),
        "idle": _rests,
        "in-sync": lambda engine: _stops_in_sync(engine, run_dir),
    }
    deadline = time.monotonic() + WAIT_S[moment]
    while time.monotonic() < deadline and not over():
        if looks[moment](engine):
            return True
    return False


def _generates(engine: psutil.Process, run_dir: Path) -> bool:
    """Return whether an engine computes, and not in a publication, in which it loads weights."""
    return _computes(engine) and version_being_published(run_dir) is None


def _computes(engine: psutil.Process) -> bool:
    """Return whether an engine computes right now: in a short time, since a response takes a fraction of a second."""
    before = _scheduled_s(engine)
    time.sleep(GLANCE_S)
    return _scheduled_s(engine) - before > GLANCE_S * BUSY_SHARE


def _scheduled_s(process: psutil.Process) -> float:
    """Return the seconds for which the threads of a process have had a core, to a microsecond; 0 if it has ended."""
    nanoseconds = 0
    for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            nanoseconds += int(path.read_text().split()[0])
    return nanoseconds / 1e9


def _rests(engine: psutil.Process) -> bool:
    before = cpu_seconds(engine)
    time.sleep(2 * WATCH_S)
    return cpu_seconds(engine) - before <= 2 * WATCH_S * IDLE_SHARE


def _stops_in_sync(engine: psutil.Process, run_dir: Path) -> bool:
    """Stop an engine if a version is being published; let it go on if the publication has ended nevertheless."""
    version = version_being_published(run_dir)
    if version is None:
        time.sleep(POLL_S)
        return False
    send([engine], signal.SIGSTOP)
    deadline = time.monotonic() + STOPPED_S
    while not is_stopped([engine]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(HELD_S)
    if version_being_published(run_dir) == version and is_stopped([engine]):
        return True
    send([engine], signal.SIGCONT)
    return False


def version_being_published(run_dir: Path) -> int | None:
    """Return the version that the schedule says is announced and not yet served; None if there is none."""
    try:
        with (run_dir / "schedule.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:  # not begun
        return None
    for line in reversed(lines[:-1]):  # what follows the last line break is being written
        if b'"announce"' in line:
            return int(json.loads(line)["version"])
        if b'"set_version"' in line or b'"begin"' in line:
            return None
    return None
