"""Injects faults into a run that lives, and watches what the run does about each of them.

All faults come from outside, by signals to processes that are found below torchrun and the run's supervisor
(soak_processes.py), a full disk (soak_disk.py), stale file handles (soak_stale.py), `megarl pool` (soak_pool.py), or
orders to functions of the soak that the run calls (soak_orders.py). One fault at a time: the next one waits until the
one before it is over. A further kind of fault needs a line in KINDS (soak_kinds.py), and a way to happen in one of
soak_replica_faults.py, soak_part_faults.py, soak_host_faults.py and soak_end_faults.py.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_checkpoints import complete  # noqa: E402
from soak_end_faults import EndFaults  # noqa: E402
from soak_happened import Happened  # noqa: E402
from soak_host_faults import HostFaults  # noqa: E402
from soak_job_ends import JobEnds  # noqa: E402
from soak_kinds import Fault  # noqa: E402
from soak_orders import SLOWER, give, withdraw  # noqa: E402
from soak_part_faults import PartFaults  # noqa: E402
from soak_place import RunPlace  # noqa: E402
from soak_processes import age, is_ready  # noqa: E402
from soak_replica_faults import ReplicaFaults  # noqa: E402
from soak_watch import WatchedRun  # noqa: E402

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
        self._replicas, self._parts = ReplicaFaults(self._watch), PartFaults(self._watch)
        hosts = None if place is None else place.several_hosts
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
