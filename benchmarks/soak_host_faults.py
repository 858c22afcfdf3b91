"""Faults of hosts and of the network between them: a rollout host is lost and back, a link is cut for a time."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_happened import Happened  # noqa: E402
from soak_kinds import Fault  # noqa: E402
from soak_place import ENGINES, SeveralHosts  # noqa: E402
from soak_survival import Survival  # noqa: E402
from soak_watch import WatchedRun  # noqa: E402

SHRUNK = "started again as soon as there is room"
GROWN = "engines that were lost are up again"
STEPS_ALONE = 3  # that are made without the host


class HostFaults:
    """Hits the hosts of the run that is watched."""

    def __init__(self, watch: WatchedRun, place: SeveralHosts) -> None:
        self._watch, self._place = watch, place

    def hit(self, fault: Fault) -> Happened:
        """Let a fault happen; return it when it is over."""
        survival = Survival(self._watch)
        event = self._watch.begin(fault, 0, "the run was working")
        happened = self._cut(event) if fault.kind.action == "cut" else self._lose(event)
        event.over = happened and survival.judge(event, [], fault.kind.target)
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
