"""Faults of all other parts of a run: processes, disks, file handles, orders. The run must survive each of them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.chaos.kinds import Fault, Happened
from benchmarks.chaos.orders import give, taken, withdraw
from benchmarks.chaos.place import ENGINES, SeveralHosts
from benchmarks.chaos.processes import ended, strike
from benchmarks.chaos.watch import Judge, WatchedRun
from benchmarks.lib.file_faults import complete, damage, fill, refused, spoil

ENDS_S = 30.0  # for all processes of a run after a second stop signal
AGAIN_S = 1.5  # after which a second stop signal is a second request
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}


class PartFaults:
    """Hits the parts of the run that is watched."""

    def __init__(self, watch: WatchedRun) -> None:
        self._watch = watch

    def hit(self, fault: Fault) -> Happened | None:
        """Let a fault happen; return it when it is over, or None if the part is not there."""
        watch, target = self._watch, fault.kind.target
        judge = Judge(watch)
        hit: list[psutil.Process] = []
        wanted = 0
        if fault.kind.has_processes:
            if not watch.found(fault, lambda: watch.find_processes(target)):
                return None
            if not (found := watch.find_processes(target)):
                return None
            hit = found if target == "job" else [found[fault.index % len(found)]]
            wanted = len(found) if target == "agent-worker" else 1  # others come and go, or are all found
            event = watch.begin(fault, hit[0].pid, f"one of {len(found)}" if len(hit) < len(found) else "all of it")
            happened = self._strike(event, hit)
        else:
            event = watch.begin(fault, 0, "the run was working")
            happened = self._disturb(event)
        if not happened:
            event.notes.append("it could not be done")
            return event
        damaged = self._damage(event) if fault.kind.action == "damage" else None
        event.over = judge.judge(event, hit, wanted)
        if damaged is not None and not refused(damaged):
            event.notes.append(f"{damaged.name} is damaged and was NOT refused")
            event.over = False
        return event

    # --- processes

    def _strike(self, event: Happened, hit: Sequence[psutil.Process]) -> bool:
        """Send the fault's signals, or ask the run to stop; False if there was none to be hit."""
        action = event.fault.kind.action
        if action in SIGNALS:
            return self._end_twice(event, hit, SIGNALS[action])
        if action == "limit":  # as a batch script does when the time limit is near
            (self._watch.run_dir / "stop").write_text("the time limit is near\n", encoding="utf-8")
            return True
        return strike(event, hit, over=lambda: self._watch.end.is_set() or ended(hit), works=hit[0])

    def _end_twice(self, event: Happened, hit: Sequence[psutil.Process], number: signal.Signals) -> bool:
        """Signal torchrun's process group twice, as Ctrl-C does; False if a process is left after `ENDS_S`."""
        agent = self._watch.find_agent()
        if agent is None:
            return False
        for _ in range(2):
            try:
                os.killpg(agent.pid, number)
            except ProcessLookupError:  # it has saved and ended at the first one
                break
            self._watch.end.wait(AGAIN_S)
        begun = time.monotonic()
        if not self._watch.wait(lambda: ended(hit), ENDS_S):
            event.notes.append(f"processes are left {ENDS_S:.0f} s after the second signal")
            return False
        event.notes.append(f"all had ended {time.monotonic() - begun:.1f} s after the second signal")
        return True

    def _damage(self, event: Happened) -> Path:
        """Damage the newest checkpoint of a run whose processes have been killed; return it."""
        newest = complete(self._watch.checkpoints)[-1]
        name = damage(newest, random.Random(f"soak-damage-{event.fault.index}-{event.fault.delay_s}"))
        event.notes.append(f"{name} of {newest.name} damaged")
        return newest

    # --- files and orders

    def _disturb(self, event: Happened) -> bool:
        """Let a fault happen that hits no process from outside; False if it could not happen."""
        watch, fault = self._watch, event.fault
        if fault.kind.target == "disk":
            event.notes.append(f"full for {fill(watch.run_dir, fault.seconds, watch.end.is_set):.1f} s")
            return True
        if fault.kind.target == "checkpoint-disk":
            full_s = fill(watch.checkpoints, fault.seconds, lambda: watch.end.is_set() or watch.has_told(event))
            event.notes.append(f"full for {full_s:.1f} s")
            return True
        if fault.kind.target == "files":
            answers = spoil(watch.orders, fault.seconds, watch.end.is_set)
            told = ", ".join(f"{name} {times}" for name, times in sorted(answers.items()))
            event.notes.append(f"stale handles: {told or 'nobody has asked'}")
            return bool(answers)
        return self._order(event)

    def _order(self, event: Happened) -> bool:
        """Give an order to the run's functions and wait until one has taken it; False if none does."""
        watch, name = self._watch, event.fault.kind.order
        before = len(taken(watch.orders, name))
        give(watch.orders, name)
        if not watch.notices(lambda: len(taken(watch.orders, name)) > before):
            withdraw(watch.orders, name)
            return False
        event.pid = taken(watch.orders, name)[-1]
        event.spoiled = int(event.fault.kind.action == "spoil")
        event.notes.append(f"the order {name} was taken by process {event.pid}")
        return True


SHRUNK = "started again as soon as there is room"
GROWN = "engines that were lost are up again"
STEPS_ALONE = 3  # that are made without the host


class HostFaults:
    """Hits the hosts of the run that is watched."""

    def __init__(self, watch: WatchedRun, place: SeveralHosts) -> None:
        self._watch, self._place = watch, place

    def hit(self, fault: Fault) -> Happened:
        """Let a fault happen; return it when it is over."""
        judge = Judge(self._watch)
        event = self._watch.begin(fault, 0, "the run was working")
        happened = self._cut(event) if fault.kind.action == "cut" else self._lose(event)
        event.over = happened and judge.judge(event)
        return event

    def _cut(self, event: Happened) -> bool:
        """Cut the link between the trainer and all others for a time."""
        watch = self._watch
        with self._place.cut_link():
            watch.end.wait(event.fault.seconds)
        event.notes.append(
            f"the link was cut for {event.fault.seconds:.0f} s; {watch.step - event.step} steps meanwhile"
        )
        return True

    def _lose(self, event: Happened) -> bool:
        """Take the power from a host with an engine alone; give it back when the run goes on without it."""
        hosts, watch = self._place.hosts, self._watch
        shrunk, grown = watch.told(SHRUNK), watch.told(GROWN)
        hosts.lose(ENGINES)
        try:
            if not watch.recovers(lambda: watch.told(SHRUNK) > shrunk):
                event.notes.append("the pool does NOT go on without it")
                return False
            event.notes.append(f"the pool goes on without it {watch.seconds - event.at_s:.0f} s after the loss")
            if not self._serves(watch.replicas - 1, STEPS_ALONE):
                event.notes.append(f"NO {STEPS_ALONE} steps were made without it")
                return False
        finally:
            hosts.revive(ENGINES)
        self._place.start_agent(watch.run_dir, ENGINES)
        back = watch.seconds
        if not watch.recovers(lambda: watch.told(GROWN) > grown):
            event.notes.append("its engine was NOT started again")
            return False
        if not self._serves(watch.replicas, 1):
            event.notes.append("its engine does NOT serve again")
            return False
        event.notes.append(f"its engine serves again {watch.seconds - back:.0f} s after the host was back")
        return True

    def _serves(self, engines: int, steps: int) -> bool:
        """Wait for so many steps in a row with so many engines."""

        def served() -> bool:
            latest = self._watch.records[-steps:]
            return all(each.get("rollout/replicas_alive") == engines for each in latest)

        return self._watch.recovers(served)
