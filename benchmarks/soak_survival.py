"""Judges whether a run is over the loss of a part: it is there again, steps go on, and that has cost what it may.

Steps count from when the part is there again: the trainer may have had batches for some before it needed that part, and
what the loss costs, such as engines that are started anew, comes with the first step after them.
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
        starts = int(watch.find_agent() != self._agent)
        again = watch.restarts - (0 if starts else self._restarts)
        event.recovered_s = watch.seconds - event.at_s
        event.redone_steps = max(0, event.step - least)
        event.notes.append(
            f"two more steps {event.recovered_s:.0f} s after it began, from step {least} on; the ranks were restarted "
            f"{again} times ({kind.restarts} are allowed), the job {starts} times ({kind.starts})"
        )
        if event.redone_steps > kind.redone:
            event.notes.append(f"{event.redone_steps} steps were made again, {kind.redone} are allowed")
        return again <= kind.restarts and starts <= kind.starts and event.redone_steps <= kind.redone
