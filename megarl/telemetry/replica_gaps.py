"""Finds the replica whose log-probs differ from the trainer's by more than those of the others, at equal lag. Pure.

Tokens of older weights differ more, and a slow replica has more of them. So the gap that is expected of a replica is
what the others have at its own lags, weighted with its own tokens (direct standardisation). Of the others the median
counts, so that a second sick replica does not hide the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

Means = tuple[int, float]  # (tokens, mean |engine - trainer| of them)


@dataclass(frozen=True)
class ReplicaGap:
    """The comparison of one replica with the others, over the `tokens` at lags that can be compared.

    `gap`: its mean |engine - trainer|, in nats; `expected`: that of the others.
    """

    tokens: int
    gap: float
    expected: float

    def excess(self, floor: float) -> float:
        """Return how many times larger the gap is than expected; `expected` counts as at least `floor`."""
        return self.gap / max(self.expected, floor)


def compare_replicas(by_replica: Mapping[int, Mapping[int, Means]], min_tokens: int) -> dict[int, ReplicaGap]:
    """Return the comparison of each replica that has `min_tokens` tokens at lags at which another one has as many.

    `by_replica[replica][lag]`: its tokens of that lag.
    """
    found = {}
    for replica, own in by_replica.items():
        tokens, gap, expected = 0, 0.0, 0.0
        for lag, (count, mean) in own.items():
            if (usual := _of_others(by_replica, replica, lag, min_tokens)) is not None:
                tokens, gap, expected = tokens + count, gap + count * mean, expected + count * usual
        if tokens >= min_tokens:
            found[replica] = ReplicaGap(tokens, gap / tokens, expected / tokens)
    return found


def _of_others(by_replica: Mapping[int, Mapping[int, Means]], replica: int, lag: int, min_tokens: int) -> float | None:
    """Return the median over the other replicas with enough tokens of that lag; None if there is none."""
    means = [
        own[lag][1]
        for other, own in by_replica.items()
        if other != replica and lag in own and own[lag][0] >= min_tokens
    ]
    # The lower median: of two others, one may be sick.
    return statistics.median_low(means) if means else None
