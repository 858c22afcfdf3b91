"""Faults for a run that lives: which, when, on which process; and what the run did about each of them.

All faults come from outside, by signals to processes that are found below the run's supervisor. At most one replica is
out of service at a time, because a run that loses all of them has nothing to go on with: the next fault waits until the
one before it is over. A further kind of fault needs a line in KINDS, and a way to happen in `Injector`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

POLL_S = 0.2
BUSY_WAIT_S = 10.0  # for an engine that works, so that a fault hits requests in flight
RECOVER_S = 240.0  # for a replica that was lost, until a publication has replaced it
STOP_S = 30.0  # for the thread of the faults, when the run has ended
NOTICE_S = 120.0  # for a run that goes on after a replica was slow
DUTY = (0.15, 0.05)  # seconds of SIGSTOP and SIGCONT of a slow replica, in turn
_LOG = re.compile(r"replica-(\d+)\.log")

FaultTarget = Literal["engine", "replica"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `loses`: the run must replace the replica; otherwise the replica must go on.

    `room`: the share of the run that a fault of this kind needs, relative to the others. `seconds`: how long it lasts
    at least and at most, 0 if it is over at once.
    """

    name: str
    loses: bool
    room: float
    seconds: tuple[float, float] = (0.0, 0.0)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", loses=True, room=3.0),
        Kind("hang", loses=True, room=6.0, seconds=(90.0, 90.0)),  # or until the run has replaced it
        Kind("pause", loses=False, room=1.0, seconds=(2.0, 5.0)),
        Kind("slow", loses=False, room=2.0, seconds=(8.0, 15.0)),
    )
}


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule: `delay_s` after step `after_step` it hits a process of `replica` for `seconds`.

    `target`: the engine process alone, or the replica's actor with its engine.
    """

    kind: str
    target: FaultTarget
    replica: int
    after_step: int
    delay_s: float
    seconds: float

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} the {self.target} of replica {self.replica}{lasting}"


def schedule(
    seed: int, wanted: Sequence[tuple[str, FaultTarget]], *, replicas: int, first: int, last: int
) -> list[Fault]:
    """Return the wanted faults in a random order, spread over the steps from `first` to `last` by the room they need.

    Raises ValueError for an unknown kind, and if there are no steps.
    """
    if unknown := {kind for kind, _ in wanted} - KINDS.keys():
        raise ValueError(f"unknown faults: {sorted(unknown)}; known are {sorted(KINDS)}")
    if not 0 <= first < last:
        raise ValueError(f"faults need steps to happen in, not {first} to {last}")
    rng = random.Random(f"soak-{seed}")
    order = list(wanted)
    rng.shuffle(order)
    total, before = sum(KINDS[kind].room for kind, _ in order), 0.0
    faults = []
    for kind, target in order:
        step = first + int((last - first) * before / total)
        seconds = round(rng.uniform(*KINDS[kind].seconds), 1)
        faults.append(Fault(kind, target, rng.randrange(replicas), step, round(rng.uniform(0.0, 1.0), 2), seconds))
        before += KINDS[kind].room
    return faults


@dataclass
class Happened:
    """A fault that was injected: when, on which process, and what the run did. `over`: it did what it should.

    `busy`: the engine had requests. `continued`, `restarted`: the responses that other engines have finished, and the
    replicas that were restarted, until the next fault.
    """

    fault: Fault
    pid: int
    step: int
    at_s: float
    over: bool = False
    busy: bool = False
    continued: int = 0
    restarted: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "" if self.over else "NOT OVER: "
        return f"step {self.step}, {self.fault} (pid {self.pid}): {state}{'; '.join(self.notes)}"


@dataclass(frozen=True)
class Replica:
    """The processes of one replica: its Ray actor and the engine that the actor has started."""

    actor: psutil.Process
    engine: psutil.Process

    def hit_by(self, fault: Fault) -> list[psutil.Process]:
        """Return the processes that a fault hits."""
        return [self.engine] if fault.target == "engine" else [self.actor, self.engine]


def find_replicas(run_dir: Path) -> dict[int, Replica]:
    """Return the replicas of a living run that have an engine, by index: that of the log which they write to."""
    actors: dict[int, psutil.Process] = {}
    engines: dict[int, psutil.Process] = {}  # by the pid of the actor
    for process in _below_supervisor(run_dir):
        try:
            title = "".join(process.cmdline()[:1])
            if "EngineCore" in title:
                engines[process.ppid()] = process
            elif title.startswith("ray::EngineReplica") and (index := _index_of(process.pid)) is not None:
                actors[index] = process
        except (psutil.Error, OSError):
            continue  # it has ended
    return {index: Replica(actor, engines[actor.pid]) for index, actor in actors.items() if actor.pid in engines}


def _below_supervisor(run_dir: Path) -> list[psutil.Process]:
    try:
        state = json.loads((run_dir / "supervisor.json").read_text(encoding="utf-8"))
        return psutil.Process(int(state["process"]["pid"])).children(recursive=True)
    except (OSError, ValueError, KeyError, psutil.Error):
        return []


def _index_of(pid: int) -> int | None:
    """Return the number of the replica's log to which a process prints."""
    match = _LOG.fullmatch(Path(os.readlink(f"/proc/{pid}/fd/1")).name)
    return int(match[1]) if match else None


def processes_left(run_dir: Path, within_s: float) -> list[str]:
    """Return the processes that still print to a log of a run that has ended, `within_s` seconds later at the latest.

    Every process of a run prints to a file in its directory, or to the log beside it.
    """
    deadline = time.monotonic() + within_s
    while (left := _printing_to(run_dir)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def _printing_to(run_dir: Path) -> list[str]:
    places, found = (f"{run_dir}/", f"{run_dir}.log"), []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(places):
                found.append(f"{process.info['name']} (pid {process.pid})")
    return found


def send(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to each process that still runs; psutil never signals another one that has got its pid."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def is_stopped(processes: Sequence[psutil.Process]) -> bool:
    """Tell whether all processes are stopped by a signal."""
    try:
        return all(process.status() == psutil.STATUS_STOPPED for process in processes)
    except psutil.NoSuchProcess:
        return False


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process has used; 0 if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def hold(processes: Sequence[psutil.Process], seconds: float, until: Callable[[], bool]) -> float:
    """Stop processes for `seconds`, or until `until()`; return how long they were stopped, 0.0 if they were not."""
    send(processes, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        time.sleep(min(POLL_S, seconds))
        if not is_stopped(processes):
            return 0.0
        while time.monotonic() - begun < seconds and not until():
            time.sleep(min(POLL_S, seconds))
    finally:
        send(processes, signal.SIGCONT)
    return time.monotonic() - begun


def throttle(processes: Sequence[psutil.Process], seconds: float, until: Callable[[], bool]) -> float:
    """Stop and continue processes in turn for `seconds`, or until `until()`; return the seconds they were stopped."""
    begun, stopped = time.monotonic(), 0.0
    while time.monotonic() - begun < seconds and not until():
        stopped += hold(processes, DUTY[0], lambda: False)
        time.sleep(DUTY[1])
    return stopped


class Injector:
    """Injects the faults of a schedule into a run, one after the other, in a thread of its own, until `stop`."""

    def __init__(self, run_dir: Path, faults: Sequence[Fault], *, replicas: int, say: Callable[[str], None]) -> None:
        self.happened: list[Happened] = []
        self._run_dir, self._faults, self._replicas, self._say = run_dir, faults, replicas, say
        self._begun = time.monotonic()
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> str:
        """End the injection, because the run has ended; return what went wrong in it, "" if nothing did."""
        self._end.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            return f"the faults: waited {STOP_S:.0f} s for their thread to end"
        return "" if self._error is None else f"the faults: {self._error!r}"

    def _run(self) -> None:
        try:
            for fault in self._faults:
                if not self._inject(fault):
                    return
        except BaseException as error:
            self._error = error

    def _inject(self, fault: Fault) -> bool:
        """Wait for the fault's time, let it happen, and wait until it is over; False if the faults must end here."""
        if not self._wait(lambda: self._step >= fault.after_step and self._complete, None):
            return False
        self._end.wait(fault.delay_s)
        replica = find_replicas(self._run_dir).get(fault.replica)
        if replica is None or self._end.is_set():
            self._say(f"{fault}: the replica was not found")
            return False
        busy = self._wait_until_busy(replica.engine)
        hit = replica.hit_by(fault)
        event = Happened(fault, hit[0].pid, self._step, time.monotonic() - self._begun, busy=busy)
        self.happened.append(event)
        event.notes.append("it had requests" if busy else "it was idle")
        self._say(f"step {event.step}: {fault} (pid {event.pid}), {event.notes[0]}")
        if not self._strike(fault, replica, event):
            event.notes.append("no process could be hit")
            return False
        event.over = self._replaced(event, replica) if KINDS[fault.kind].loses else self._goes_on(event, replica)
        self._say(f"step {self._step}: {'; '.join(event.notes[1:])}")
        return event.over

    def _strike(self, fault: Fault, replica: Replica, event: Happened) -> bool:
        """Send the fault's signals; note how long a process was stopped. False if there was none to be hit."""
        hit = replica.hit_by(fault)
        gone = self._gone_or_ended(replica)
        if fault.kind == "kill":
            there = hit[0].is_running()
            send(hit[:1], signal.SIGKILL)
            return there
        used, begun = cpu_seconds(replica.engine), time.monotonic()
        stopped = (throttle if fault.kind == "slow" else hold)(hit, fault.seconds, gone)
        lasted, used = time.monotonic() - begun, cpu_seconds(replica.engine) - used
        event.notes.append(f"stopped for {stopped:.1f} of {lasted:.1f} s, {max(used, 0.0):.1f} s of its core used")
        return stopped > 0.0

    def _gone_or_ended(self, replica: Replica) -> Callable[[], bool]:
        return lambda: self._end.is_set() or not replica.actor.is_running()

    def _replaced(self, event: Happened, old: Replica) -> bool:
        """Wait until a publication has replaced the replica, and the run has gone on with it."""
        since, index = event.step, event.fault.replica
        begun = time.monotonic()

        def replaced() -> bool:
            new = find_replicas(self._run_dir).get(index)
            other = new is not None and new.engine.pid != old.engine.pid
            return other and self._sum("sync/restarted_replicas", since) >= 1

        if not self._wait(replaced, RECOVER_S):
            event.notes.append(f"replica {index} was not replaced within {time.monotonic() - begun:.0f} s")
            return False
        restarted = self._sum("sync/restarted_replicas", since)
        event.notes.append(
            f"replaced {time.monotonic() - self._begun - event.at_s:.0f} s after it began, {self._step - since} steps "
            f"later; {restarted:.0f} replicas restarted"
        )
        return True

    def _goes_on(self, event: Happened, replica: Replica) -> bool:
        """Wait until the same engine has worked again and two more steps are done, without a restart."""
        used, since = cpu_seconds(replica.engine), self._step

        def works() -> bool:
            return self._step >= since + 2 and cpu_seconds(replica.engine) > used

        if not self._wait(works, NOTICE_S):
            event.notes.append(f"the engine did not work again within {NOTICE_S:.0f} s, or the run ended")
            return False
        restarted = self._sum("sync/restarted_replicas", event.step)
        event.notes.append(f"the same engine goes on; {restarted:.0f} replicas restarted")
        return restarted == 0

    @property
    def _records(self) -> list[dict[str, Any]]:
        return read_so_far(self._run_dir)

    @property
    def _step(self) -> int:
        return len(self._records)

    @property
    def _complete(self) -> bool:
        return len(find_replicas(self._run_dir)) == self._replicas

    def _sum(self, metric: str, since: int) -> float:
        return sum(record.get(metric) or 0.0 for record in self._records[since:])

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a condition; False if the run ends before, or `timeout_s` has passed (None: the run's own end)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            if self._end.wait(POLL_S) or (deadline is not None and time.monotonic() > deadline):
                return condition()
        return True

    def _wait_until_busy(self, engine: psutil.Process) -> bool:
        """Wait until an engine computes; False if it does not for BUSY_WAIT_S."""
        deadline = time.monotonic() + BUSY_WAIT_S
        while time.monotonic() < deadline and not self._end.is_set():
            before = cpu_seconds(engine)
            time.sleep(0.1)
            if cpu_seconds(engine) - before > 0.01:
                return True
        return False


def read_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps that a living run has recorded; a line that is being written is left out."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:  # not begun
        return []
    return [record for record in map(json.loads, lines) if "time/step" in record]


def missing(faults: Sequence[Fault], happened: Sequence[Happened]) -> list[str]:
    """Return the kinds of the schedule of which no fault has happened and come to its end."""
    over = {(each.fault.kind, each.fault.target) for each in happened if each.over}
    return sorted({f"{fault.kind} {fault.target}" for fault in faults if (fault.kind, fault.target) not in over})


def lethal(happened: Sequence[Happened]) -> list[Happened]:
    """Return the faults that cost a replica."""
    return [each for each in happened if KINDS[each.fault.kind].loses]
