"""What the rollout side measures of a batch: pure bookkeeping, the clock is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


class BusyClock:
    """Wall time during which at least one of several overlapping activities ran."""

    def __init__(self) -> None:
        self._active = 0
        self._since = 0.0
        self._total = 0.0

    def enter(self, now: float) -> None:
        if self._active == 0:
            self._since = now
        self._active += 1

    def leave(self, now: float) -> None:
        if self._active == 0:
            raise ValueError("leave without enter")
        self._active -= 1
        if self._active == 0:
            self._total += now - self._since

    def total(self, now: float) -> float:
        """Seconds so far, the running activity included."""
        return self._total + (now - self._since if self._active else 0.0)


@dataclass
class BatchStats:
    """Of the samples that finished since the last batch was taken."""

    generate_seconds: list[float] = field(default_factory=list)
    reward_seconds: list[float] = field(default_factory=list)
    reward_errors: Counter[str] = field(default_factory=Counter)
    sample_failures: Counter[str] = field(default_factory=Counter)
    skipped_prompts: int = 0
    engine_seconds: float = 0.0

    def metrics(self, *, queue_depth: int, replicas_alive: int) -> dict[str, float]:
        """The declared `rollout/*` metrics that only this side knows."""
        values: dict[str, float] = {
            "rollout/skipped_prompts": self.skipped_prompts,
            "rollout/queue_depth": queue_depth,
            "rollout/engine_seconds": self.engine_seconds,
            "rollout/replicas_alive": replicas_alive,
            "reward/errors": sum(self.reward_errors.values()),
        }
        if self.generate_seconds:
            ordered = sorted(self.generate_seconds)
            values |= {
                "rollout/generate_seconds_p50": quantile(ordered, 0.50),
                "rollout/generate_seconds_p95": quantile(ordered, 0.95),
                "rollout/generate_seconds_p99": quantile(ordered, 0.99),
                "rollout/generate_seconds_max": ordered[-1],
            }
        if self.reward_seconds:
            values |= {
                "rollout/reward_seconds_mean": sum(self.reward_seconds) / len(self.reward_seconds),
                "rollout/reward_seconds_max": max(self.reward_seconds),
            }
        return values


def quantile(ordered: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of a sorted, non-empty sequence."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
