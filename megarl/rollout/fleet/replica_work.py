"""The speed of each engine since the last batch, from the tokens that it reports and its time with work. Pure.

The mean over all engines hides a slow one, because the others have most of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


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
