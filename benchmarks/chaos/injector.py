"""Injects faults into a run that lives, and watches what the run does about each of them.

All faults come from outside, by signals to processes that are found below torchrun and the run's supervisor
(chaos/processes.py), a full disk or stale file handles (lib/file_faults.py), `megarl pool` (below), or orders
to functions of the soak that the run calls (chaos/orders.py). One fault at a time: the next one waits until the one
before it is over. A further kind of fault needs a line in KINDS (chaos/kinds.py), and a way to happen in one of
this module, chaos/part_faults.py and chaos/end_faults.py.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.chaos.end_faults import EndFaults, JobEnds
from benchmarks.chaos.kinds import Fault, Happened
from benchmarks.chaos.orders import SLOWER, give, withdraw
from benchmarks.chaos.part_faults import HostFaults, PartFaults
from benchmarks.chaos.place import RunPlace
from benchmarks.chaos.processes import Replica, age, is_ready, strike
from benchmarks.chaos.watch import TOLD, Judge, WatchedRun, catch
from benchmarks.lib.file_faults import complete
from benchmarks.lib.hosts import Hosts
from benchmarks.lib.whole_run import environment

STOP_S = 30.0  # for the thread of the faults, when the run has ended
CONTINUED = "rollout/continued"


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
        place: RunPlace | None = None,
    ) -> None:
        """`slower`: the run is asked to take longer steps while a fault lasts (`Tempo`). `place`: see WatchedRun."""
        self.ends = JobEnds()
        self.engine_start_s: float | None = None  # from the start of the first replica until the pool was ready
        self._faults, self._say, self._slower = faults, say, slower
        self._end = threading.Event()
        self._watch = WatchedRun(run_dir, faults, replicas=replicas, say=say, end=self._end, place=place)
        hosts = None if place is None else place.several_hosts
        self._replicas = ReplicaFaults(self._watch, None if hosts is None else hosts.hosts)
        self._parts = PartFaults(self._watch)
        self._hosts = HostFaults(self._watch, hosts) if hosts is not None else None
        self._endings = EndFaults(self._watch, self.ends, hosts)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    @property
    def happened(self) -> list[Happened]:
        """The faults that have happened."""
        return self._watch.happened

    def stop(self) -> str:
        """End the injection, because the run has ended; return what went wrong in it, "" if nothing did."""
        self._end.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            return f"the faults: waited {STOP_S:.0f} s for their thread to end"
        return "" if self._error is None else f"the faults: {''.join(traceback.format_exception(self._error))}"

    def _run(self) -> None:
        try:
            for fault in self._faults:
                if not self._inject(fault):
                    return
        except BaseException as error:
            self._error = error

    def _inject(self, fault: Fault) -> bool:
        """Wait for the fault's time, let it happen, and wait until it is over; False if the faults must end here."""
        watch = self._watch

        def due() -> bool:
            self._note_engine_start()
            saved = len(complete(watch.checkpoints)) >= fault.kind.checkpoints
            return watch.step >= fault.after_step and saved and watch.complete

        if not watch.wait(due, None):
            return False
        self._end.wait(fault.delay_s)
        with self._longer_steps():
            event = self._ways(fault)(fault)
        if event is None:
            return False
        event.over = event.over and self._noticed(event)
        since = event.step - event.redone_steps
        event.continued = int(watch.sum(CONTINUED, since))
        event.restarted = int(watch.sum("sync/restarted_replicas", since))
        self._say(f"step {watch.step}: {'; '.join(event.notes[1:])}")
        return event.over

    def _ways(self, fault: Fault) -> Callable[[Fault], Happened | None]:
        """Return what lets a fault of this kind happen."""
        if fault.kind.ending is not None:
            return self._endings.hit
        if fault.kind.needs_hosts:
            if self._hosts is None:
                raise ValueError(f"{fault} needs several hosts, and the run is on one")
            return self._hosts.hit
        return self._parts.hit if fault.kind.outcome == "survived" else self._replicas.hit

    @contextlib.contextmanager
    def _longer_steps(self) -> Iterator[None]:
        if self._slower:
            give(self._watch.orders, SLOWER)
        try:
            yield
        finally:
            withdraw(self._watch.orders, SLOWER)

    def _noticed(self, event: Happened) -> bool:
        """Wait until the run has counted and told the fault as its kind says, and has saved after a full disk.

        Responses that go on elsewhere are counted when they are trained, which may be after the loss is made good.
        """
        watch, kind = self._watch, event.fault.kind
        if kind.loses and event.busy and not watch.notices(lambda: watch.sum(CONTINUED, event.step) >= 1):
            event.notes.append(f"{CONTINUED} has NOT counted it")
            return False
        if kind.metric and not watch.notices(lambda: watch.sum(kind.metric, event.step) >= 1):
            event.notes.append(f"{kind.metric} has NOT counted it")
            return False
        if not watch.notices(lambda: watch.has_told(event)):  # a batch may be trained later
            event.notes.append(f"the run has NOT told: {kind.told}")
            return False
        saved = complete(watch.checkpoints)
        if kind.target == "checkpoint-disk" and not watch.recovers(
            lambda: bool(set(complete(watch.checkpoints)) - set(saved))
        ):
            event.notes.append(f"no checkpoint was saved within {watch.RECOVER_S:.0f} s after it, or the run ended")
            return False
        return True

    def _note_engine_start(self) -> None:
        watch = self._watch
        if self.engine_start_s is None and watch.complete and is_ready(watch.run_dir):
            self.engine_start_s = max(map(age, (each.actor for each in watch.find_replicas().values())), default=0.0)


class ReplicaFaults:
    """Hits the replicas of the run that is watched."""

    def __init__(self, watch: WatchedRun, hosts: Hosts | None = None) -> None:
        """`hosts`: those of a run on several ones."""
        self._watch, self._hosts = watch, hosts

    def hit(self, fault: Fault) -> Happened | None:
        """Let a fault happen; return it when it is over, or None if there is no such replica."""
        watch = self._watch
        if not watch.found(fault, lambda: self._victim(fault)):
            return None
        replica = self._victim(fault)
        if replica is None:
            return None
        moment, judge = fault.kind.moment, Judge(watch, replica)
        caught = catch(moment, replica.engine, watch.run_dir, watch.end.is_set)
        hit = [replica.engine] if fault.kind.target == "engine" else [replica.actor, replica.engine]
        event = watch.begin(fault, hit[0].pid, TOLD[moment][caught], busy=moment == "busy" and caught)
        if not caught and moment == "in-sync":
            event.notes.append("no publication was caught")
        elif not self._happens(event, hit, replica):
            event.notes.append("it could not be done")
        else:
            event.over = judge.judge(event)
        return event

    def _victim(self, fault: Fault) -> Replica | None:
        """Return the replica that a fault is to hit. It counts those that live: new ones may have new numbers."""
        found = self._watch.find_replicas()
        return found[sorted(found)[fault.index]] if fault.index < len(found) else None

    def _happens(self, event: Happened, hit: list[psutil.Process], replica: Replica) -> bool:
        if event.fault.kind.action in ("drain", "add", "remove"):
            return self._change_pool(event, replica.engine)

        def over() -> bool:
            return self._watch.end.is_set() or not replica.actor.is_running()

        return strike(event, hit, over=over, works=replica.engine)

    def _change_pool(self, event: Happened, engine: psutil.Process) -> bool:
        """Have `megarl pool` change the pool: drain or remove the replica of an engine, or add one; False if it fails.

        The pool is in the end as large as it was.
        """
        watch = self._watch
        change = PoolChange(watch.run_dir, event.notes.append, watch.goes_on, watch.wait, self._hosts)
        if event.fault.kind.action == "add":
            return change.add_for_a_while()
        found = {each.engine: number for number, each in watch.find_replicas().items()}
        if engine not in found:
            return False
        return (change.drain if event.fault.kind.action == "drain" else change.exchange)(found[engine])


COMMAND_S = 300.0  # for `megarl pool`, which waits for the start of an engine
SERVE_S = 300.0  # for an engine that joins with the next publication


@dataclass(frozen=True)
class PoolChange:
    """Changes the pool of the run in `run_dir`, and tells `note` what each command has answered.

    `goes_on()` waits until the run has made two more steps, False if it does not. `wait` is `WatchedRun.wait`.
    """

    run_dir: Path
    note: Callable[[str], object]
    goes_on: Callable[[], bool]
    wait: Callable[[Callable[[], bool], float], bool]
    hosts: Hosts | None = None  # of the run, whose supervisor is on the first one

    def drain(self, number: int) -> bool:
        """Take a replica out of work for two steps, and back in; False if the run refuses or does not go on."""
        return all(self._ask("drain", str(number), *undo) and self.goes_on() for undo in ([], ["--undo"]))

    def add_for_a_while(self) -> bool:
        """Add a replica, let it serve for two steps, and remove it; False if one of that fails."""
        number = self._add()
        return number is not None and self.goes_on() and self._remove(number)

    def exchange(self, number: int) -> bool:
        """Remove a replica, and two steps later add another one; False if one of that fails."""
        return self._remove(number) and self._add() is not None and self.goes_on()

    def _add(self) -> int | None:
        """Return the number of a replica that was added and serves; None if it does not."""
        before = set(self.states())
        if not self._ask("add") or not (added := set(self.states()) - before):
            return None
        (number,) = added
        return number if self.wait(lambda: self.states().get(number) == "serving", SERVE_S) else None

    def _remove(self, number: int) -> bool:
        return self._ask("remove", str(number)) and self.goes_on() and number not in self.states()

    def states(self) -> dict[int, str]:
        """Return the state of each replica by its number; {} if the run does not say it."""
        told = self._run("list", "--json")
        if told.returncode:
            return {}
        return {each["replica"]: each["state"] for each in json.loads(told.stdout)["replicas"]}

    def _ask(self, action: str, *arguments: str) -> bool:
        told = self._run(action, *arguments)
        self.note((told.stdout or told.stderr).strip().splitlines()[-1])
        return told.returncode == 0

    def _run(self, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megarl", "pool", action, str(self.run_dir), *arguments]
        if self.hosts is not None:
            return self.hosts.call(0, *command, timeout_s=COMMAND_S)
        return subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
