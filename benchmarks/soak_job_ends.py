"""Tells the faults how a job has ended, and holds its next start back until they have looked at that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_S = 120.0  # for the fault to look at the end of the job, and to take its cause away


class JobEnds:
    """The exit codes of a job, from who waits for its process to the fault that has made it end."""

    def __init__(self) -> None:
        self._codes: list[int] = []
        self._free = threading.Event()
        self._free.set()

    def ended(self, code: int) -> None:
        """Note that the job has ended; return when no fault looks at that (any more)."""
        self._codes.append(code)
        self._free.wait(LOOK_S)

    @contextmanager
    def awaited(self) -> Iterator[Callable[[], int | None]]:
        """Within the block, yield what tells the code with which the job has ended in it; it is not started again."""
        before = len(self._codes)
        self._free.clear()
        try:
            yield lambda: self._codes[before] if len(self._codes) > before else None
        finally:
            self._free.set()
