"""Clocks of watchers, which stop while the machine or the watcher is suspended."""

import time
from collections.abc import Callable

# Limits how often a frequent event is reported.


class RateLimit:
    """Allows one report per `interval_s` seconds."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._last: float | None = None

    def allows(self) -> bool:
        """Return whether a report is allowed now; if so, the next is allowed after the interval."""
        now = self._clock()
        if self._last is not None and now - self._last < self._interval_s:
            return False
        self._last = now
        return True


# Margins between the timeouts of nested waits. The inner wait knows the cause of a delay, so it must end first and
# report it.

# Seconds that the other ranks wait longer than the timeout of the work that rank 0 does for them.
GRACE_S = 60.0


class WatchedTime:
    """A clock that stops while its owner does not look: a pause between two looks counts as at most `most_s`.

    The watched process may have been paused together with the watcher, and still gets its full time to show a sign.
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
