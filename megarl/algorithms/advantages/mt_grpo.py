"""MT-GRPO's advantage (arXiv:2505.11821): credit for each of the model's turns, from rewards of the turns.

The paper has two turns, of which the first has a reward of its own: A_1 = A^out + lambda A^turn and A_2 = A^out, with
A^out the normalised rewards of the outcomes and A^turn those of the first turn. Here it is for any number of turns with
rewards: the tokens of turn k get

    A_k = A^out + lambda (A^turn_k + A^turn_{k+1} + ...)

because a turn is the cause of what comes after it, and of nothing before. A^turn_j is normalised over those samples of
the group that have a turn j with a reward. With two turns, of which the second has the reward 0, it is the paper's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pydantic import Field

from megarl.algorithms.advantages.grpo import standardised
from megarl.algorithms.interface.group_rewards import ADVANTAGES, Advantages, GroupRewards
from megarl.common.options import Section


class MTGRPOOptions(Section):
    """The weight of the turns, lambda, is 1 in the paper's experiments; `eps` is that of `grpo`."""

    turn_coef: float = Field(1.0, ge=0, description="Weight of the turns' advantages beside the outcome's.")
    eps: float = Field(1e-4, ge=0, description="Added to the standard deviations.")


@ADVANTAGES.register(
    "mt_grpo",
    title="grpo, plus `turn_coef` x (r - mean) / std of each turn from the token's on",
    paper="arXiv:2505.11821",
)
def mt_grpo(batch: GroupRewards, options: MTGRPOOptions) -> Advantages:
    """Return A_k for each turn of a sample with rewards of turns; of one without them, GRPO's advantage."""
    return [_of_group(group, by_turn, options) for group, by_turn in zip(batch.rewards, batch.turns, strict=True)]


def _of_group(
    rewards: Sequence[float], by_turn: Sequence[Sequence[float]], options: MTGRPOOptions
) -> list[float | Sequence[float]]:
    """Return the advantages of the samples of one group, whose turns have the rewards `by_turn`."""
    own: list[list[float]] = [[] for _ in rewards]  # of each turn alone
    for turn in range(max(map(len, by_turn), default=0)):
        having = [index for index, each in enumerate(by_turn) if turn < len(each)]
        values = standardised([by_turn[index][turn] for index in having], options.eps)
        for index, value in zip(having, values, strict=True):
            own[index].append(value)
    return [
        [outcome + options.turn_coef * value for value in _from_each_on(each)] if each else outcome
        for outcome, each in zip(standardised(rewards, options.eps), own, strict=True)
    ]


def _from_each_on(values: Sequence[float]) -> list[float]:
    """Return the sum of each value and all later ones."""
    return list(itertools.accumulate(values[::-1]))[::-1]
