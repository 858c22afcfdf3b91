"""Tells an engine that is much slower than the others from their reports. Pure: the caller has the clock.

A slow engine answers every call, so nothing counts it as lost; but each step waits for its responses.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

# The speed of each engine since the last batch, from the tokens that it reports and its time with work. Pure.
#
# The mean over all engines hides a slow one, because the others have most of the tokens.


@dataclass
class _Work:
    calls: int = 0  # that it works on
    since: float = 0.0  # up to when its time is counted
    busy_s: float = 0.0
    tokens: int = 0


class ReplicaWork:
    """Collects the work by replica; the caller has the clock, in seconds.

    Tokens come some seconds after they were made, so the time of an engine is counted up to its last report. The time
    of one that reports no token stays, and is counted together with its next tokens.
    """

    def __init__(self) -> None:
        self._works: dict[int, _Work] = {}

    def begin(self, replica: int, now: float) -> None:
        """Record that a replica gets a call."""
        work = self._works.setdefault(replica, _Work())
        if not work.calls:
            work.since = now
        work.calls += 1

    def note(self, replica: int, tokens: int, now: float) -> None:
        """Record a report with new tokens of a call. Raises KeyError without `begin`."""
        work = self._works[replica]
        work.busy_s += now - work.since
        work.since = now
        work.tokens += tokens

    def end(self, replica: int, now: float) -> None:
        """Record that a replica has no more to do for a call. Raises KeyError without `begin`."""
        self.note(replica, 0, now)
        self._works[replica].calls -= 1

    def take(self) -> dict[int, float]:
        """Return the tokens per second of each replica that has reported tokens since the last `take`, by its index."""
        rates = {}
        for replica, work in sorted(self._works.items()):
            if work.tokens and work.busy_s > 0:
                rates[replica] = work.tokens / work.busy_s
                work.busy_s, work.tokens = 0.0, 0
        self._works = {index: work for index, work in self._works.items() if work.calls or work.busy_s}
        return rates


def rate_metrics(rates: dict[int, float]) -> dict[str, float]:
    """Return the declared metrics of what `ReplicaWork.take` has returned."""
    if not rates:
        return {}
    name = "rollout/replica_tokens_per_second"
    return {
        f"{name}_min": min(rates.values()),
        f"{name}_max": max(rates.values()),
        **{f"{name}/{replica}": rate for replica, rate in rates.items()},
    }


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
