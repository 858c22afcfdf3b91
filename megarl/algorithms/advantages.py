"""Advantages, with options and papers. Importing this module registers them in `ADVANTAGES`."""

import itertools
import math
from collections.abc import Sequence

from pydantic import Field

from megarl.algorithms.interface.group_rewards import ADVANTAGES, Advantages, GroupRewards, centred
from megarl.common.options import Section

# GRPO's advantage (arXiv:2402.03300 section 4.1.2).


class GRPOOptions(Section):
    """Keeps the division finite; the default is TRL's, verl's is 1e-6."""

    eps: float = Field(1e-4, ge=0, description="Added to the standard deviation.")


@ADVANTAGES.register("grpo", title="(r - mean) / std of the group", paper="arXiv:2402.03300")
def grpo(batch: GroupRewards, options: GRPOOptions) -> Advantages:
    """Return (r - mean) / (std + eps) with the sample standard deviation (n - 1), as in TRL and verl."""
    return [standardised(group, options.eps) for group in batch.rewards]


def standardised(rewards: Sequence[float], eps: float) -> list[float]:
    """Return (r - mean) / (std + eps); exactly 0 for equal rewards."""
    values = centred(rewards)
    if not any(values):
        return values
    std = math.sqrt(math.fsum(value * value for value in values) / (len(values) - 1))
    return [value / (std + eps) for value in values]


# Dr. GRPO's advantage (arXiv:2503.20783): dividing by std favours prompts that are too easy or too hard.


@ADVANTAGES.register("dr_grpo", title="r - mean of the group", paper="arXiv:2503.20783")
def dr_grpo(batch: GroupRewards) -> Advantages:
    """Return r - mean of the group."""
    return [centred(group) for group in batch.rewards]


# RLOO's advantage (arXiv:2402.14740): the baseline is the mean of the other samples of the group.


@ADVANTAGES.register("rloo", title="r - mean of the group's other samples", paper="arXiv:2402.14740")
def rloo(batch: GroupRewards) -> Advantages:
    """Return r_i - mean of the others = n / (n - 1) * (r_i - mean); 0 for a group of one sample."""
    return [_without_self(centred(group)) for group in batch.rewards]


def _without_self(values: list[float]) -> list[float]:
    n = len(values)
    return [value * n / (n - 1) for value in values] if n > 1 else values


# REINFORCE++ (arXiv:2501.03262): advantages are normalised over the whole batch, not within the group.
#
# Mean and sample variance (n - 1) are over trained tokens, so a response counts once per token, as in the paper's code
# (OpenRLHF) and in verl.


class ReinforceOptions(Section):
    """Keeps the division finite; the default is verl's."""

    eps: float = Field(1e-8, gt=0, description="Added to the variance.")


@ADVANTAGES.register("reinforce_pp", title="r, normalised over the tokens of the batch", paper="arXiv:2501.03262")
def reinforce_pp(batch: GroupRewards, options: ReinforceOptions) -> Advantages:
    """Return (r - mean) / sqrt(var + eps) over the batch. Even a group of equal rewards has a signal.

    In the paper the KL to the reference is part of the reward: `algorithm.kl.where: reward`.
    """
    return _normalised(batch.rewards, batch.tokens, options.eps)


@ADVANTAGES.register(
    "reinforce_pp_baseline", title="r - mean of the group, normalised over the tokens of the batch",
    paper="arXiv:2501.03262",
)  # fmt: skip
def reinforce_pp_baseline(batch: GroupRewards, options: ReinforceOptions) -> Advantages:
    """Return (x - mean) / sqrt(var + eps) over the batch, x = r - mean of the group."""
    return _normalised([centred(group) for group in batch.rewards], batch.tokens, options.eps)


def _normalised(values: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], eps: float) -> Advantages:
    """Return the values normalised to mean 0 and variance 1 over all tokens; 0 with fewer than two tokens."""
    pairs = [
        (value, count) for group, counts in zip(values, tokens, strict=True)
        for value, count in zip(group, counts, strict=True)
    ]  # fmt: skip
    total = sum(count for _, count in pairs)
    if total < 2:
        return [[0.0] * len(group) for group in values]
    mean = math.fsum(value * count for value, count in pairs) / total
    variance = math.fsum((value - mean) ** 2 * count for value, count in pairs) / (total - 1)
    scale = 1.0 / math.sqrt(variance + eps)
    return [[(value - mean) * scale for value in group] for group in values]


# MT-GRPO's advantage (arXiv:2505.11821): credit for each of the model's turns, from rewards of turns.
#
# The paper has two turns and a reward for the first: A_1 = A^out + lambda A^turn and A_2 = A^out, with A^out the
# normalised outcome rewards and A^turn the normalised rewards of the first turn. Here any number of turns may have
# rewards. A turn affects only what follows it, so the tokens of turn k get
#
#     A_k = A^out + lambda (A^turn_k + A^turn_{k+1} + ...)
#
# A^turn_j is normalised over the samples of the group that have a reward for turn j. Two turns, the second with reward
# 0, give the paper's advantage.


class MTGRPOOptions(Section):
    """In the paper's experiments lambda (`turn_coef`) is 1; `eps` is that of `grpo`."""

    turn_coef: float = Field(1.0, ge=0, description="Weight of the turns' advantages alongside the outcome's.")
    eps: float = Field(1e-4, ge=0, description="Added to the standard deviations.")


@ADVANTAGES.register(
    "mt_grpo",
    title="grpo, plus `turn_coef` x (r - mean) / std of each turn from the token's on",
    paper="arXiv:2505.11821",
)
def mt_grpo(batch: GroupRewards, options: MTGRPOOptions) -> Advantages:
    """Return A_k for each turn of a sample with turn rewards, GRPO's advantage for a sample without."""
    return [_of_group(group, by_turn, options) for group, by_turn in zip(batch.rewards, batch.turns, strict=True)]


def _of_group(
    rewards: Sequence[float], by_turn: Sequence[Sequence[float]], options: MTGRPOOptions
) -> list[float | Sequence[float]]:
    """Return the advantages of one group's samples, whose turns have the rewards `by_turn`."""
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
