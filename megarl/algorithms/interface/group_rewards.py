"""The interface of advantages: the rewards of a batch of prompt groups go in, one number per sample comes out.

An advantage by turn gives a sample with rewards of turns one number for each of the model's turns instead, which is the
advantage of the tokens of that turn.

An advantage is a pure function on Python floats, computed once per step over all its groups, equal on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megarl.algorithms.interface.registry import Chosen, FunctionRegistry

Advantages = Sequence[Sequence[float | Sequence[float]]]
"""For each group and each of its samples its advantage, or one for each of its turns."""


@dataclass(frozen=True)
class GroupRewards:
    """The groups that a step trains on; both fields have one entry per sample of each group, in the same order.

    `rewards`: after shaping, of those samples that did not fail; groups may differ in size. `tokens`: the tokens of
    each sample that are trained; 0 for one that is masked as a whole. `turn_rewards`: what the turns of each sample
    have earned besides, in order; none if its reward function returns none. Empty as a whole if no sample has any.
    """

    rewards: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[int]]
    turn_rewards: Sequence[Sequence[Sequence[float]]] = ()

    @property
    def turns(self) -> Sequence[Sequence[Sequence[float]]]:
        """The rewards of the turns of every sample, also if no sample has any."""
        return self.turn_rewards or [[()] * len(group) for group in self.rewards]


ADVANTAGES: FunctionRegistry[GroupRewards, Advantages] = FunctionRegistry("advantage")


def advantages_of(chosen: Chosen[GroupRewards, Advantages], batch: GroupRewards) -> Advantages:
    """Return the advantages of a batch, in the order of its rewards.

    Raises:
        ValueError: a reward is not finite, or the function's result is not one finite number per sample, or one for
            each turn of a sample that has rewards of its turns.
    """
    for group, by_turn in zip(batch.rewards, batch.turns, strict=True):
        if not all(math.isfinite(reward) for reward in (*group, *chain(*by_turn))):
            raise ValueError(f"a reward is not finite: {list(group)}, of turns: {list(by_turn)}")
    result = chosen(batch)
    if [len(group) for group in result] != [len(group) for group in batch.rewards]:
        raise ValueError(
            f"the advantage {chosen.name} returned groups of {[len(group) for group in result]} numbers for groups of "
            f"{[len(group) for group in batch.rewards]} samples"
        )
    for found, rewards in zip(chain(*result), chain(*batch.turns), strict=True):
        values = found if isinstance(found, Sequence) else [found]
        if values is found and len(values) != len(rewards):
            raise ValueError(f"the advantage {chosen.name} returned {len(values)} numbers for {len(rewards)} turns")
        if bad := [value for value in values if not math.isfinite(value)]:
            raise ValueError(f"the advantage {chosen.name} returned {bad[0]}, which is not finite")
    return result


def zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal to within 1e-8, so that a baseline of the group leaves nothing."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-8


def centred(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the group; exactly 0 for a group of one sample, or of equal rewards."""
    if zero_variance(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
