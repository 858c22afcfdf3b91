"""Faults of replicas and their engines: lets them happen, and judges whether the run replaces or keeps the engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_happened import Happened, longest_gap  # noqa: E402
from soak_kinds import Fault  # noqa: E402
from soak_moments import TOLD, catch  # noqa: E402
from soak_pool import PoolChange  # noqa: E402
from soak_processes import Replica, cpu_seconds, ended  # noqa: E402
from soak_strike import strike  # noqa: E402
from soak_watch import WatchedRun  # noqa: E402


class ReplicaFaults:
    """Hits the replicas of the run that is watched."""

    def __init__(self, watch: WatchedRun) -> None:
        self._watch = watch

    def hit(self, fault: Fault) -> Happened | None:
        """Let a fault happen; return it when it is over, or None if there is no such replica."""
        watch = self._watch
        if not watch.found(fault, lambda: self._victim(fault)):
            return None
        replica = self._victim(fault)
        if replica is None:
            return None
        moment = fault.kind.moment
        caught = catch(moment, replica.engine, watch.run_dir, watch.end.is_set)
        hit = [replica.engine] if fault.kind.target == "engine" else [replica.actor, replica.engine]
        event = watch.begin(fault, hit[0].pid, TOLD[moment][caught], busy=moment == "busy" and caught)
        if not caught and moment == "in-sync":
            event.notes.append("no publication was caught")
        elif not self._happens(event, hit, replica):
            event.notes.append("it could not be done")
        else:
            judges = {"replaced": self._replaced, "same": self._goes_on, "exchanged": self._exchanged}
            event.over = judges[fault.kind.outcome](event, replica)
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
        change = PoolChange(watch.run_dir, event.notes.append, watch.goes_on, watch.wait)
        if event.fault.kind.action == "add":
            return change.add_for_a_while()
        found = {each.engine: number for number, each in watch.find_replicas().items()}
        if engine not in found:
            return False
        return (change.drain if event.fault.kind.action == "drain" else change.exchange)(found[engine])

    def _replaced(self, event: Happened, old: Replica) -> bool:
        """Wait until a publication has replaced the replica, and the run has gone on with it."""
        watch, since, begun, left_out = self._watch, event.step, time.monotonic(), event.left_out_before

        def replaced() -> bool:
            found = [replica.engine.pid for replica in watch.find_replicas().values()]
            complete = len(found) == watch.replicas and old.engine.pid not in found
            if not complete or watch.sum("sync/restarted_replicas", since) < 1:
                return False
            # If a publication has noticed the loss, the new engine starts while the run goes on, and joins a later one.
            serving = [record.get("rollout/replicas_alive") for record in watch.records[since:]]
            return serving[-1] == watch.replicas

        if not watch.recovers(replaced):
            event.notes.append(f"the replica was not replaced within {time.monotonic() - begun:.0f} s")
            return False
        newest = max((each.actor for each in watch.find_replicas().values()), key=psutil.Process.create_time)
        event.new_pid, event.new_since = newest.pid, newest.create_time()
        restarted = watch.sum("sync/restarted_replicas", since)
        event.recovered_s = watch.seconds - event.at_s
        event.longest_gap_s = longest_gap(watch.records, since, time.time() - event.recovered_s)
        event.beside = watch.left_out > left_out
        event.notes.append(
            f"replaced {event.recovered_s:.0f} s after it began, {watch.step - since} steps "
            f"later; {restarted:.0f} replicas restarted; {event.longest_gap_s:.0f} s without a step at most"
            f"{'; a publication has gone on without it' if event.beside else ''}"
        )
        return True

    def _goes_on(self, event: Happened, replica: Replica) -> bool:
        """Wait until the same engine has worked again and two more steps are done, without a restart."""
        watch = self._watch
        used, since = cpu_seconds(replica.engine), watch.step

        def works() -> bool:
            return watch.step >= since + 2 and cpu_seconds(replica.engine) > used

        if not watch.notices(works):
            event.notes.append(f"the engine did not work again within {watch.NOTICE_S:.0f} s, or the run ended")
            return False
        restarted = watch.sum("sync/restarted_replicas", event.step)
        event.notes.append(f"the same engine goes on; {restarted:.0f} replicas restarted")
        return restarted == 0

    def _exchanged(self, event: Happened, old: Replica) -> bool:
        """Wait until the engine of a removed replica has ended; another one has been added. Nothing was restarted."""
        watch = self._watch
        if not watch.recovers(lambda: ended([old.engine]) and watch.complete):
            event.notes.append(f"its engine has not ended within {watch.RECOVER_S:.0f} s, or the run ended")
            return False
        restarted = watch.sum("sync/restarted_replicas", event.step)
        event.notes.append(f"another engine is in its place; {restarted:.0f} replicas restarted")
        return restarted == 0
