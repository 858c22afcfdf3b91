"""How fast an engine works, from the tokens it reports. Pure: the caller passes times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass
class Work:
    """An engine's tokens since the last batch, and its busy time. A mean over all engines would hide a slow one.

    Reports are seconds late, so time counts up to the last report. The time of an engine without new tokens is kept,
    and counts with its next tokens.
    """

    calls: int = 0  # in progress
    since: float = 0.0  # its time is counted up to here
    busy_s: float = 0.0
    tokens: int = 0

    def begin(self, now: float) -> None:
        """Record that the engine gets a call."""
        if not self.calls:
            self.since = now
        self.calls += 1

    def note(self, tokens: int, now: float) -> None:
        """Record a report with new tokens of a call."""
        self.busy_s += now - self.since
        self.since = now
        self.tokens += tokens

    def end(self, now: float) -> None:
        """Record that the engine has finished a call."""
        self.note(0, now)
        self.calls -= 1

    def take(self) -> float | None:
        """Return the tokens per second since the last `take`; None if no token was reported."""
        if not self.tokens or self.busy_s <= 0:
            return None
        rate = self.tokens / self.busy_s
        self.busy_s, self.tokens = 0.0, 0
        return rate


def rate_metrics(works: Mapping[int, Work]) -> dict[str, float]:
    """Return the metrics of the replicas' speed since the last call; `works`: by index."""
    rates = {index: rate for index, work in works.items() if (rate := work.take()) is not None}
    if not rates:
        return {}
    name = "rollout/replica_tokens_per_second"
    return {
        f"{name}_min": min(rates.values()),
        f"{name}_max": max(rates.values()),
        **{f"{name}/{index}": rate for index, rate in rates.items()},
    }


# An engine is too slow if the others' median is this many times faster. Load and prompts explain much less, because
# requests in flight are spread evenly.
SLOW = 8.0
WINDOW_S = 600.0  # after this many response-seconds, older ones count half


@dataclass
class Progress:
    """An engine's tokens and the seconds that responses took for them.

    A slow engine answers every call, so nothing else makes it lost, but each step waits for its responses.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    slow_since: float | None = None

    @property
    def value(self) -> float:
        """Tokens per second of a response."""
        return self.tokens / self.seconds

    def note(self, tokens: int, seconds: float, others: Iterable[Progress], now: float, patience_s: float) -> str:
        """Record a report; return why the engine is too slow to use, or empty.

        `seconds`: the sum over the responses since the last report. `patience_s`: how long it must be slow without a
        break, because first calls may take long.
        """
        if seconds <= 0:
            return ""
        self.tokens += tokens
        self.seconds += seconds
        if self.seconds > WINDOW_S:
            self.tokens /= 2
            self.seconds /= 2
        values = [each.value for each in others if each is not self and each.seconds]
        if not values or self.value * SLOW >= (usual := statistics.median(values)):
            self.slow_since = None
            return ""
        if self.slow_since is None:
            self.slow_since = now
        if now - self.slow_since < patience_s:
            return ""
        return (
            f"makes {self.value:.3g} tokens per second of a response, and has for {now - self.slow_since:.0f} s been "
            f"more than {SLOW:.0f} times slower than the others, which make {usual:.3g}"
        )
