"""RLOO's advantage (arXiv:2402.14740): the baseline is the mean of the other samples of the group."""

from __future__ import annotations

from megarl.algorithms.interface.group_rewards import ADVANTAGES, Advantages, GroupRewards, centred


@ADVANTAGES.register("rloo", title="r - mean of the group's other samples", paper="arXiv:2402.14740")
def rloo(batch: GroupRewards) -> Advantages:
    """Return r_i - mean of the others = n / (n - 1) * (r_i - mean); 0 for a group of one sample."""
    return [_without_self(centred(group)) for group in batch.rewards]


def _without_self(values: list[float]) -> list[float]:
    n = len(values)
    return [value * n / (n - 1) for value in values] if n > 1 else values
