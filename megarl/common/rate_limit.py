"""Limits how often something is reported that may happen many times a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Allows one report per `interval_s` seconds."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._last: float | None = None

    def allows(self) -> bool:
        """Tell whether a report may be made now; if so, the next one may be made after the interval."""
        now = self._clock()
        if self._last is not None and now - self._last < self._interval_s:
            return False
        self._last = now
        return True
