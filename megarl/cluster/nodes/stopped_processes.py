"""Finds processes that have been stopped (SIGSTOP) for a long time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from megarl.common.clocks import WatchedTime
from megarl.common.process.processes import ProcessId, state_of

LOOK_S = 2.0  # between two looks
_STOPPED = ("T", "t")  # by a signal, by a debugger


class StoppedProcesses:
    """Measures, in time that its owner has seen pass, how long each process has been stopped."""

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`bound_s`: the time after which `find` returns a process."""
        self._bound_s, self._clock = bound_s, clock
        self._time = WatchedTime(2 * LOOK_S, clock)
        self._since: dict[ProcessId, float] = {}
        self._next = clock()

    def is_due(self) -> bool:
        """Tell whether it is time to look: not more often than every LOOK_S."""
        return self._clock() >= self._next

    def find(self, processes: Iterable[ProcessId]) -> list[ProcessId]:
        """Return those of the processes that have been stopped at each look for the bound."""
        self._next = self._clock() + LOOK_S
        now = self._time.look()
        stopped = [process for process in processes if state_of(process) in _STOPPED]
        self._since = {process: self._since.get(process, now) for process in stopped}
        return [process for process, since in self._since.items() if now - since > self._bound_s]
