"""Injects faults into a run that lives, one at a time: the next one waits until the one before it is over.

A further kind of fault needs a line in KINDS (chaos/kinds.py), and a way to happen in ACTIONS (chaos/actions.py).
"""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.chaos.actions import ACTIONS, find_target
from benchmarks.chaos.judge import CONTINUED, RESTARTED, Judge
from benchmarks.chaos.kinds import Fault, Happened
from benchmarks.chaos.orders import SLOWER, give, withdraw
from benchmarks.chaos.watch import MOMENT_NOTES, WatchedRun, catch
from benchmarks.lib.file_faults import complete

STOP_S = 30.0  # for the thread of the faults, when the run has ended


class Injector:
    """Injects the faults of a schedule into a run, one after the other, in a thread of its own, until `stop`."""

    def __init__(
        self,
        run_dir: Path,
        faults: Sequence[Fault],
        *,
        replicas: int,
        say: Callable[[str], None],
    ) -> None:
        self._faults, self._say = faults, say
        self._end = threading.Event()
        self._watch = WatchedRun(run_dir, replicas=replicas, say=say, end=self._end)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    @property
    def happened(self) -> list[Happened]:
        """The faults that have happened."""
        return self._watch.happened

    @property
    def ended(self) -> bool:
        """True after the last fault, and after one that the run is not over."""
        return not self._thread.is_alive()

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
        # A run whose newest checkpoint is damaged resumes the one before.
        saved = 2 if fault.kind.action == "damage" else 0

        def due() -> bool:
            return watch.step >= fault.after_step and len(complete(watch.checkpoints)) >= saved and watch.complete

        if not watch.wait(due, None):
            return False
        self._end.wait(fault.delay_s)
        with self._longer_steps():
            event = self._hit(fault)
        if event is None:
            return False
        since = event.step - event.redone_steps
        event.continued, event.restarted = int(watch.sum(CONTINUED, since)), int(watch.sum(RESTARTED, since))
        self._say(f"step {watch.step}: {'; '.join(event.notes[1:])}")
        return event.over

    def _hit(self, fault: Fault) -> Happened | None:
        """Let the fault happen; return it when it is over, or None if what it hits is not there."""
        watch, moment, caught = self._watch, fault.kind.moment, False
        target = watch.found(fault, lambda: find_target(watch, fault))
        if target is None:
            return None
        judge, note = Judge(watch, target), target.note
        if target.replica is not None:
            caught = catch(moment, target.replica.engine, watch.run_dir, watch.end.is_set)
            note = MOMENT_NOTES[moment][caught]
        pid = target.processes[0].pid if target.processes else 0
        event = watch.begin(fault, pid, note, busy=moment == "busy" and caught)
        if moment == "in-sync" and not caught:
            event.notes.append("no publication was caught")
        elif not ACTIONS[fault.kind.action](watch, event, target):
            event.notes.append("it could not be done")
        else:
            event.over = judge.judge(event)
        return event

    @contextlib.contextmanager
    def _longer_steps(self) -> Iterator[None]:
        """Let the trainer take its time: a fast machine must not reach the last step before the fault is over."""
        give(self._watch.orders, SLOWER)
        try:
            yield
        finally:
            withdraw(self._watch.orders, SLOWER)
