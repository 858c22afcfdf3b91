"""The time that a watcher has seen pass. A machine that was suspended, or a watcher that was, proves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable


class WatchedTime:
    """A clock that stands still while its owner does not look: a pause between two looks counts as `most_s` at most.

    Whoever is watched may have been paused together with the watcher, and gets the same time as always to show a sign.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`most_s`: a little more than what the owner needs from one look to the next, in seconds."""
        self._most_s, self._clock = most_s, clock
        self._seen, self._looked_at = 0.0, clock()

    def look(self) -> float:
        """Return the seconds that the owner has seen pass since the beginning."""
        now = self._clock()
        self._seen += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._seen
