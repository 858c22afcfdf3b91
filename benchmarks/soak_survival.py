"""Judges whether a run is over the loss of a part: it is there again, steps go on, and that has cost what it may.

Steps count from when the part is there again. With the controller, or the queue, engines may be lost that the old
controller had started. A publication of the new one replaces them, and the trainer may have batches for two steps
before that: so the run is over such a loss when AHEAD more steps are done and all replicas serve. A fault that comes
earlier could hit an engine which is being started, and what the loss has cost would count as that fault's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_happened import Happened  # noqa: E402
from soak_processes import ended  # noqa: E402
from soak_watch import WatchedRun  # noqa: E402

REBUILT = {"controller", "queue"}  # each is started anew with the other one
AHEAD = 4  # steps: two for which there were batches, and two of the new controller, with a publication in one of them


class Survival:
    """Knows torchrun's process as it was before a fault, and how often it had restarted the ranks."""

    def __init__(self, watch: WatchedRun) -> None:
        self._watch = watch
        self._agent, self._restarts = watch.find_agent(), watch.restarts

    def judge(self, event: Happened, hit: Sequence[psutil.Process], target: str, wanted: int = 1) -> bool:
        """Wait until the part is there again and two more steps are done; compare what that cost with its kind.

        `hit`: the processes that the fault has ended. `wanted`: how many processes of `target` there are to be.
        """
        watch, kind = self._watch, event.fault.kind
        least = since = watch.step

        def back() -> bool:
            nonlocal least
            least = min(least, watch.step)  # a resume goes back to its checkpoint
            return ended(hit) and (not hit or len(watch.find_processes(target)) >= wanted)

        def two_more_steps() -> bool:
            nonlocal least, since
            least, since = min(least, watch.step), min(since, watch.step)
            return watch.step >= since + 2

        if not watch.recovers(back):
            event.notes.append(f"the {target} was not there again within {watch.RECOVER_S:.0f} s, or the run ended")
            return False
        since = watch.step
        if not watch.recovers(two_more_steps):
            event.notes.append(f"no two more steps were done within {watch.RECOVER_S:.0f} s, or the run ended")
            return False
        event.recovered_s = watch.seconds - event.at_s
        if target in REBUILT and not watch.recovers(lambda: watch.step >= since + AHEAD and _all_serve(watch)):
            event.notes.append(f"not all replicas served {AHEAD} steps later within {watch.RECOVER_S:.0f} s")
            return False
        starts = int(watch.find_agent() != self._agent)
        again = watch.restarts - (0 if starts else self._restarts)
        event.redone_steps = max(0, event.step - least)
        event.notes.append(
            f"two more steps {event.recovered_s:.0f} s after it began, from step {least} on; the ranks were restarted "
            f"{again} times ({kind.restarts} are allowed), the job {starts} times ({kind.starts})"
        )
        if event.redone_steps > kind.redone:
            event.notes.append(f"{event.redone_steps} steps were made again, {kind.redone} are allowed")
        return again <= kind.restarts and starts <= kind.starts and event.redone_steps <= kind.redone


def _all_serve(watch: WatchedRun) -> bool:
    return watch.records[-1].get("rollout/replicas_alive") == watch.replicas
