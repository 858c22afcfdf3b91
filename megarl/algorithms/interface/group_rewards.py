"""The interface of advantages: from the rewards of a batch of prompt groups to one number per sample.

An advantage by turn returns one number per turn of the model for samples with turn rewards: the advantage of that
turn's tokens.

An advantage is a pure function on Python floats, computed once per step over all groups, with equal results on every
rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megarl.algorithms.interface.registry import Chosen, FunctionRegistry

Advantages = Sequence[Sequence[float | Sequence[float]]]
"""For each group the advantage of each sample, or of each of its turns."""


@dataclass(frozen=True)
class GroupRewards:
    """The groups that a step trains on; fields have one entry per sample of each group, in the same order.

    `rewards`: after shaping, of samples that did not fail; groups may differ in size. `tokens`: trained tokens of each
    sample; 0 if it is masked as a whole. `turn_rewards`: additional rewards of each sample's turns, in order; () if no
    sample has any.
    """

    rewards: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[int]]
    turn_rewards: Sequence[Sequence[Sequence[float]]] = ()

    @property
    def turns(self) -> Sequence[Sequence[Sequence[float]]]:
        """The turn rewards of every sample, even if no sample has any."""
        return self.turn_rewards or [[()] * len(group) for group in self.rewards]


ADVANTAGES: FunctionRegistry[GroupRewards, Advantages] = FunctionRegistry("advantage")


def advantages_of(chosen: Chosen[GroupRewards, Advantages], batch: GroupRewards) -> Advantages:
    """Return the advantages of a batch, in the order of its rewards.

    Raises:
        ValueError: a reward is not finite, or the function does not return one finite number per sample, or per turn of
            a sample with turn rewards.
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
    """Return whether all rewards are equal to within 1e-8, so that a group baseline leaves no signal."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= 1e-8


def centred(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the group; exactly 0 for a group of one sample, or of equal rewards."""
    if zero_variance(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
