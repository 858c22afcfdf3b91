"""Injects faults into a run that lives, and watches what the run does about each of them.

All faults come from outside, by signals to processes that are found below torchrun and the run's supervisor
(soak_processes.py), a full disk (soak_disk.py), stale file handles (soak_stale.py), `megarl pool` (soak_pool.py), or
orders to functions of the soak that the run calls (soak_orders.py). One fault at a time: the next one waits until the
one before it is over. A further kind of fault needs a line in KINDS (soak_kinds.py), and its processes a way to be
found.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_checkpoints import LEAST, complete, damage, refused  # noqa: E402
from soak_disk import fill  # noqa: E402
from soak_kinds import Fault  # noqa: E402
from soak_moments import TOLD, catch  # noqa: E402
from soak_orders import SLOWER, give, taken, withdraw  # noqa: E402
from soak_pool import PoolChange  # noqa: E402
from soak_processes import (  # noqa: E402
    CRAWL,
    DUTY,
    Replica,
    age,
    cpu_seconds,
    ended,
    find_agent,
    find_processes,
    find_replicas,
    hold,
    is_ready,
    restarts_of,
    send,
    throttle,
)
from soak_stale import spoil  # noqa: E402
from soak_variant import checkpoints_of, orders_of  # noqa: E402

POLL_S = 0.2
FIND_S = 60.0  # for a process whose title is just being changed, or that is being started
ENDS_S = 30.0  # for all processes of a run after a second stop signal
AGAIN_S = 1.5  # after which a second stop signal is a second request
RECOVER_S = 300.0  # for what was lost, until it is there again and the run goes on
STOP_S = 30.0  # for the thread of the faults, when the run has ended
NOTICE_S = 120.0  # for a run that goes on after a replica was slow
CONTINUED = "rollout/continued"
WENT_ON = "in whose place a new one is started"  # told by the controller of each replica that a publication leaves out


@dataclass
class Happened:
    """A fault that was injected: when, on which process, and what the run did. `over`: it did what it should.

    `busy`: the engine had requests. `continued`, `restarted`: the responses that other engines have finished, and the
    replicas that were restarted, until the next fault. `recovered_s`: from the fault until the run had gone on with
    what was lost. `new_pid`, `new_since`, `start_s`: the process of the replica in place of a lost one, when it began,
    and how long it took to start. `beside`: a publication has noticed the loss and has gone on without the replica, so
    that the new one started beside training and joined a later publication. `redone_steps`: steps that a resume has
    gone back. `told_before`: how often the run had told what it tells of such a fault; `left_out_before`: how often
    publications had left a replica out.
    """

    fault: Fault
    pid: int
    step: int
    at_s: float
    over: bool = False
    busy: bool = False
    continued: int = 0
    restarted: int = 0
    recovered_s: float = 0.0
    new_pid: int = 0
    new_since: float = 0.0
    start_s: float = 0.0
    beside: bool = False
    longest_gap_s: float = 0.0
    redone_steps: int = 0
    told_before: int = 0
    left_out_before: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "" if self.over else "NOT OVER: "
        return f"step {self.step}, {self.fault} (pid {self.pid}): {state}{'; '.join(self.notes)}"


def longest_gap(records: Sequence[Mapping[str, Any]], since: int, at: float) -> float:
    """Return the longest time in seconds without the end of a step, from a fault on that came after step `since`.

    `at`: when it came, in seconds since the epoch.
    """
    ends = [at, *(record["wall_time"] for record in records[since:])]
    return max((after - before for before, after in itertools.pairwise(ends)), default=0.0)


class Injector:
    """Injects the faults of a schedule into a run, one after the other, in a thread of its own, until `stop`."""

    def __init__(
        self,
        run_dir: Path,
        faults: Sequence[Fault],
        *,
        replicas: int,
        say: Callable[[str], None],
        slower: bool = False,
    ) -> None:
        """`slower`: the run is asked to take longer steps while a fault lasts (`Tempo`)."""
        self.happened: list[Happened] = []
        self.engine_start_s: float | None = None  # from the start of the first replica until the pool was ready
        self._run_dir, self._faults, self._replicas, self._say = run_dir, faults, replicas, say
        self._orders, self._slower = orders_of(run_dir), slower
        self._checkpoints = checkpoints_of(run_dir, [fault.kind for fault in faults])
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
        damages = fault.kind.action == "damage"

        def due() -> bool:
            self._note_engine_start()
            others = not damages or len(complete(self._checkpoints)) >= LEAST
            return self._step >= fault.after_step and self._complete and others

        if not self._wait(due, None):
            return False
        self._end.wait(fault.delay_s)
        inject = self._hit_part if fault.kind.outcome == "survived" else self._hit_replica
        with self._longer_steps():
            event = inject(fault)
        if event is None:
            return False
        event.over = event.over and self._noticed(event)
        event.continued = int(self._sum(CONTINUED, event.step))
        event.restarted = int(self._sum("sync/restarted_replicas", event.step))
        self._say(f"step {self._step}: {'; '.join(event.notes[1:])}")
        return event.over

    @contextlib.contextmanager
    def _longer_steps(self) -> Iterator[None]:
        if self._slower:
            give(self._orders, SLOWER)
        try:
            yield
        finally:
            withdraw(self._orders, SLOWER)

    def _begin(self, fault: Fault, pid: int, note: str, *, busy: bool = False) -> Happened:
        """Note that a fault happens now, and tell it."""
        event = Happened(fault, pid, self._step, time.monotonic() - self._begun, busy=busy, notes=[note])
        event.told_before, event.left_out_before = self._told(fault), self._left_out
        self.happened.append(event)
        self._say(f"step {event.step}: {fault} (pid {pid}), {note}")
        return event

    def _found(self, fault: Fault, look: Callable[[], object]) -> bool:
        """Wait until `look` finds what a fault is to hit; tell it if there is none."""
        if self._wait(lambda: bool(look()), FIND_S) and not self._end.is_set():
            return True
        self._say(f"{fault}: no process was found")
        return False

    # --- replicas

    def _hit_replica(self, fault: Fault) -> Happened | None:
        """Let a fault of a replica happen; return it when it is over, or None if there is no such replica."""
        if not self._found(fault, lambda: self._victim(fault)):
            return None
        replica = self._victim(fault)
        if replica is None:
            return None
        moment = fault.kind.moment
        caught = catch(moment, replica.engine, self._run_dir, self._end.is_set)
        hit = [replica.engine] if fault.kind.target == "engine" else [replica.actor, replica.engine]
        event = self._begin(fault, hit[0].pid, TOLD[moment][caught], busy=moment == "busy" and caught)
        if not caught and moment == "in-sync":
            event.notes.append("no publication was caught")
        elif not self._strike(event, hit, lambda: not replica.actor.is_running(), replica.engine):
            event.notes.append("it could not be done")
        else:
            judges = {"replaced": self._replaced, "same": self._goes_on, "exchanged": self._exchanged}
            event.over = judges[fault.kind.outcome](event, replica)
        return event

    def _victim(self, fault: Fault) -> Replica | None:
        """Return the replica that a fault is to hit. It counts those that live: new ones may have new numbers."""
        found = find_replicas(self._run_dir)
        return found[sorted(found)[fault.index]] if fault.index < len(found) else None

    def _strike(
        self, event: Happened, hit: Sequence[psutil.Process], gone: Callable[[], bool], works: psutil.Process
    ) -> bool:
        """Send the fault's signals; note how long a process was stopped. False if there was none to be hit.

        `gone()`: the run has ended the process that is stopped. `works`: the process that uses the core.
        """
        fault = event.fault
        if fault.kind.action in ("drain", "add", "remove"):
            return self._change_pool(event, works)
        if fault.kind.action in ("interrupt", "terminate"):
            return self._end_twice(event, hit, signal.SIGINT if fault.kind.action == "interrupt" else signal.SIGTERM)
        if fault.kind.action == "limit":
            return self._limit()
        if fault.kind.action in ("kill", "damage"):
            there = not ended(hit[:1])
            send(hit if fault.kind.target == "job" else hit[:1], signal.SIGKILL)
            return there
        used, begun = cpu_seconds(works), time.monotonic()

        def until() -> bool:
            return self._end.is_set() or gone()

        if fault.kind.action in ("slow", "crawl"):
            stopped = throttle(hit, fault.seconds, until, DUTY if fault.kind.action == "slow" else CRAWL)
        else:
            stopped = hold(hit, fault.seconds, until)
        lasted, used = time.monotonic() - begun, cpu_seconds(works) - used
        event.notes.append(f"stopped for {stopped:.1f} of {lasted:.1f} s, {max(used, 0.0):.1f} s of its core used")
        return stopped > 0.0

    def _change_pool(self, event: Happened, engine: psutil.Process) -> bool:
        """Have `megarl pool` change the pool: drain or remove the replica of an engine, or add one; False if it fails.

        The pool is in the end as large as it was.
        """

        def goes_on() -> bool:
            since = self._step
            return self._wait(lambda: self._step >= since + 2, NOTICE_S)

        change = PoolChange(self._run_dir, event.notes.append, goes_on, self._wait)
        if event.fault.kind.action == "add":
            return change.add_for_a_while()
        found = {each.engine: number for number, each in find_replicas(self._run_dir).items()}
        if engine not in found:
            return False
        return (change.drain if event.fault.kind.action == "drain" else change.exchange)(found[engine])

    def _replaced(self, event: Happened, old: Replica) -> bool:
        """Wait until a publication has replaced the replica, and the run has gone on with it."""
        since, begun, left_out = event.step, time.monotonic(), event.left_out_before

        def replaced() -> bool:
            found = [replica.engine.pid for replica in find_replicas(self._run_dir).values()]
            complete = len(found) == self._replicas and old.engine.pid not in found
            if not complete or self._sum("sync/restarted_replicas", since) < 1:
                return False
            # If a publication has noticed the loss, the new engine starts while the run goes on, and joins a later one.
            serving = [record.get("rollout/replicas_alive") for record in self._records[since:]]
            return serving[-1] == self._replicas

        if not self._wait(replaced, RECOVER_S):
            event.notes.append(f"the replica was not replaced within {time.monotonic() - begun:.0f} s")
            return False
        newest = max((each.actor for each in find_replicas(self._run_dir).values()), key=psutil.Process.create_time)
        event.new_pid, event.new_since = newest.pid, newest.create_time()
        restarted = self._sum("sync/restarted_replicas", since)
        event.recovered_s = time.monotonic() - self._begun - event.at_s
        event.longest_gap_s = longest_gap(self._records, since, time.time() - event.recovered_s)
        event.beside = self._left_out > left_out
        event.notes.append(
            f"replaced {event.recovered_s:.0f} s after it began, {self._step - since} steps "
            f"later; {restarted:.0f} replicas restarted; {event.longest_gap_s:.0f} s without a step at most"
            f"{'; a publication has gone on without it' if event.beside else ''}"
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

    def _exchanged(self, event: Happened, old: Replica) -> bool:
        """Wait until the engine of a removed replica has ended; another one has been added. Nothing was restarted."""
        if not self._wait(lambda: ended([old.engine]) and self._complete, RECOVER_S):
            event.notes.append(f"its engine has not ended within {RECOVER_S:.0f} s, or the run ended")
            return False
        restarted = self._sum("sync/restarted_replicas", event.step)
        event.notes.append(f"another engine is in its place; {restarted:.0f} replicas restarted")
        return restarted == 0

    # --- all other parts

    def _hit_part(self, fault: Fault) -> Happened | None:
        """Let a fault of another part happen; return it when it is over, or None if the part is not there."""
        agent, restarts = find_agent(self._run_dir), restarts_of(self._run_dir)
        hit: list[psutil.Process] = []
        found: list[psutil.Process] = []
        if fault.kind.has_processes:
            if not self._found(fault, lambda: find_processes(self._run_dir, fault.kind.target)):
                return None
            if not (found := find_processes(self._run_dir, fault.kind.target)):
                return None
            hit = found if fault.kind.target == "job" else [found[fault.index % len(found)]]
            event = self._begin(fault, hit[0].pid, f"one of {len(found)}" if len(hit) < len(found) else "all of it")
            happened = self._strike(event, hit, lambda: ended(hit), hit[0])
        else:
            event = self._begin(fault, 0, "the run was working")
            happened = self._disturb(event)
        if not happened:
            event.notes.append("it could not be done")
            return event
        damaged = self._damage(event) if fault.kind.action == "damage" else None
        event.over = self._survived(event, hit, agent, restarts or 0, len(found))
        if damaged is not None and not refused(damaged):
            event.notes.append(f"{damaged.name} is damaged and was NOT refused")
            event.over = False
        return event

    def _disturb(self, event: Happened) -> bool:
        """Let a fault happen that hits no process from outside; False if it could not happen."""
        fault = event.fault
        if fault.kind.target == "disk":
            event.notes.append(f"full for {fill(self._run_dir, fault.seconds, self._end.is_set):.1f} s")
            return True
        if fault.kind.target == "checkpoint-disk":
            full_s = fill(self._checkpoints, fault.seconds, lambda: self._end.is_set() or self._has_told(event))
            event.notes.append(f"full for {full_s:.1f} s")
            return True
        if fault.kind.target == "files":
            answers = spoil(self._orders, fault.seconds, self._end.is_set)
            told = ", ".join(f"{name} {times}" for name, times in sorted(answers.items()))
            event.notes.append(f"stale handles: {told or 'nobody has asked'}")
            return bool(answers)
        return self._order(event)

    def _order(self, event: Happened) -> bool:
        """Give an order to the run's functions and wait until one has taken it; False if none does."""
        name, before = event.fault.kind.order, len(taken(self._orders, event.fault.kind.order))
        give(self._orders, name)
        if not self._wait(lambda: len(taken(self._orders, name)) > before, NOTICE_S):
            withdraw(self._orders, name)
            return False
        event.pid = taken(self._orders, name)[-1]
        event.notes.append(f"the order {name} was taken by process {event.pid}")
        return True

    def _limit(self) -> bool:
        """Ask the run to stop as a batch script does when the time limit is near."""
        (self._run_dir / "stop").write_text("the time limit is near\n", encoding="utf-8")
        return True

    def _end_twice(self, event: Happened, hit: Sequence[psutil.Process], number: signal.Signals) -> bool:
        """Signal torchrun's process group twice, as Ctrl-C does; False if a process is left after `ENDS_S`."""
        agent = find_agent(self._run_dir)
        if agent is None:
            return False
        for _ in range(2):
            try:
                os.killpg(agent.pid, number)
            except ProcessLookupError:  # it has saved and ended at the first one
                break
            self._end.wait(AGAIN_S)
        begun = time.monotonic()
        if not self._wait(lambda: ended(hit), ENDS_S):
            event.notes.append(f"processes are left {ENDS_S:.0f} s after the second signal")
            return False
        event.notes.append(f"all had ended {time.monotonic() - begun:.1f} s after the second signal")
        return True

    def _damage(self, event: Happened) -> Path:
        """Damage the newest checkpoint of a run whose processes have been killed; return it."""
        newest = complete(self._checkpoints)[-1]
        name = damage(newest, random.Random(f"soak-damage-{event.fault.index}-{event.fault.delay_s}"))
        event.notes.append(f"{name} of {newest.name} damaged")
        return newest

    def _survived(
        self, event: Happened, hit: Sequence[psutil.Process], agent: psutil.Process | None, restarts: int, found: int
    ) -> bool:
        """Wait until the part is there again and two more steps are done; compare what that cost with its kind.

        `agent`, `restarts`: torchrun's process before the fault, and how often it had restarted the ranks. `found`: how
        many processes the part had.
        """
        kind, least = event.fault.kind, self._step
        wanted = found if kind.target == "agent-worker" else min(found, 1)  # others come and go, or are all found

        def back() -> bool:
            return ended(hit) and (not hit or len(find_processes(self._run_dir, kind.target)) >= wanted)

        def two_more_steps() -> bool:
            nonlocal least
            least = min(least, self._step)  # a resume goes back to its checkpoint
            return self._step >= least + 2

        if not self._wait(back, RECOVER_S):
            event.notes.append(f"the {kind.target} was not there again within {RECOVER_S:.0f} s, or the run ended")
            return False
        if not self._wait(two_more_steps, RECOVER_S):
            event.notes.append(f"no two more steps were done within {RECOVER_S:.0f} s, or the run ended")
            return False
        after = find_agent(self._run_dir)
        starts = int(after != agent)
        again = (restarts_of(self._run_dir) or 0) - (0 if starts else restarts)
        event.recovered_s = time.monotonic() - self._begun - event.at_s
        event.redone_steps = max(0, event.step - least)
        event.notes.append(
            f"two more steps {event.recovered_s:.0f} s after it began, from step {least} on; the ranks were restarted "
            f"{again} times ({kind.restarts} are allowed), the job {starts} times ({kind.starts})"
        )
        if event.redone_steps > kind.redone:
            event.notes.append(f"{event.redone_steps} steps were made again, {kind.redone} are allowed")
        return again <= kind.restarts and starts <= kind.starts and event.redone_steps <= kind.redone

    def _noticed(self, event: Happened) -> bool:
        """Wait until the run has counted and told the fault as its kind says, and has saved after a full disk.

        Responses that go on elsewhere are counted when they are trained, which may be after the loss is made good.
        """
        kind = event.fault.kind
        if kind.loses and event.busy and not self._wait(lambda: self._sum(CONTINUED, event.step) >= 1, NOTICE_S):
            event.notes.append(f"{CONTINUED} has NOT counted it")
            return False
        if kind.metric and not self._wait(lambda: self._sum(kind.metric, event.step) >= 1, NOTICE_S):
            event.notes.append(f"{kind.metric} has NOT counted it")
            return False
        if not self._wait(lambda: self._has_told(event), NOTICE_S):  # a batch may be trained later
            event.notes.append(f"the run has NOT told: {kind.told}")
            return False
        saved = complete(self._checkpoints)
        if kind.target == "checkpoint-disk" and not self._wait(
            lambda: bool(set(complete(self._checkpoints)) - set(saved)), RECOVER_S
        ):
            event.notes.append(f"no checkpoint was saved within {RECOVER_S:.0f} s after it, or the run ended")
            return False
        return True

    def _has_told(self, event: Happened) -> bool:
        return not event.fault.kind.told or self._told(event.fault) > event.told_before

    def _told(self, fault: Fault) -> int:
        """Return how often the run has told what it tells of such a fault."""
        return _count(self._run_dir.with_suffix(".log"), fault.kind.told)

    @property
    def _left_out(self) -> int:
        """The number of times that a publication has gone on without a replica that it has found lost."""
        return _count(self._run_dir / "logs" / "controller.log", WENT_ON)

    # --- the run

    def _note_engine_start(self) -> None:
        if self.engine_start_s is None and self._complete and is_ready(self._run_dir):
            self.engine_start_s = max(
                map(age, (each.actor for each in find_replicas(self._run_dir).values())), default=0.0
            )

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


def _count(log: Path, text: str) -> int:
    """Return how often a log has a text; 0 if there is no log, or no text."""
    return log.read_text(encoding="utf-8", errors="replace").count(text) if text and log.is_file() else 0


def read_so_far(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps that a living run has recorded; a line that is being written is left out."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:  # not begun
        return []
    return [record for record in map(json.loads, lines) if "time/step" in record]


def lethal(happened: Sequence[Happened]) -> list[Happened]:
    """Return the faults that cost a replica."""
    return [each for each in happened if each.fault.kind.loses]
