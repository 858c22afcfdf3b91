"""Tells an engine that is much slower than the others from their reports. Pure: the caller has the clock.

A slow engine answers every call, so nothing counts it as lost; but each step waits for its responses.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

# How many times slower than the median of the others an engine must be. Load and prompts explain much less: the
# requests in flight are spread evenly.
SLOW = 8.0
WINDOW_S = 600.0  # response-seconds after which older ones count half


@dataclass
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0
    slow_since: float | None = None

    @property
    def value(self) -> float:
        """Tokens per second of a response."""
        return self.tokens / self.seconds


class ProgressRates:
    """Collects tokens and the seconds that responses took for them, by replica."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: for how long a replica must be slow without a break; its first calls may take long."""
        self._patience_s = patience_s
        self._rates: dict[int, _Rate] = {}

    def note(self, replica: int, tokens: int, seconds: float, now: float) -> str:
        """Record a report; return why the replica is too slow to be used, empty if it is not.

        `seconds`: the sum over the responses, since the report before.
        """
        if seconds <= 0:
            return ""
        rate = self._rates.setdefault(replica, _Rate())
        rate.tokens += tokens
        rate.seconds += seconds
        if rate.seconds > WINDOW_S:
            rate.tokens /= 2
            rate.seconds /= 2
        others = [each.value for index, each in self._rates.items() if index != replica]
        if not others or rate.value * SLOW >= (usual := statistics.median(others)):
            rate.slow_since = None
            return ""
        if rate.slow_since is None:
            rate.slow_since = now
        if now - rate.slow_since < self._patience_s:
            return ""
        return (
            f"makes {rate.value:.3g} tokens per second of a response, and has for {now - rate.slow_since:.0f} s been "
            f"more than {SLOW:.0f} times slower than the others, which make {usual:.3g}"
        )

    def forget(self, replica: int) -> None:
        """Forget a replica that is lost or replaced."""
        self._rates.pop(replica, None)
