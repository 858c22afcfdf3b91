"""The rule that ends a run whose reward function fails for too many samples. Pure."""

from __future__ import annotations

from collections import deque

WINDOW = 64  # latest samples of a function; of fewer, all


class ErrorLimit:
    """Counts the failures among the latest samples of one reward function.

    The limit is passed when at least `min_errors` of the latest `WINDOW` samples have failed (of the latest
    `min_errors`, if these are more), and they are a larger share than `max_share` of them.
    """

    def __init__(self, max_share: float, min_errors: int) -> None:
        self._max_share, self._min_errors = max_share, min_errors
        self._failed: deque[bool] = deque(maxlen=max(WINDOW, min_errors))
        self.errors = 0  # of all samples

    def note(self, failed: bool) -> bool:
        """Record one sample; return whether the limit is passed."""
        self.errors += failed
        self._failed.append(failed)
        recent = sum(self._failed)
        return failed and recent >= self._min_errors and recent > self._max_share * len(self._failed)

    @property
    def recent(self) -> str:
        """The failures among the latest samples, as text."""
        return f"{sum(self._failed)} of the latest {len(self._failed)} samples"
