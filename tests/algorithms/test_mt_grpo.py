"""Advantages by turn: the paper's for two turns, its extension, and GRPO's where the turns have no signal."""

import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.interface.group_rewards import GroupRewards, advantages_of

REWARDS = st.floats(-5, 5, allow_subnormal=False)
GROUPS = st.lists(
    st.lists(st.tuples(REWARDS, st.lists(REWARDS, max_size=4)), min_size=1, max_size=6), min_size=1, max_size=3
)


def advantages(
    groups: list[list[tuple[float, list[float]]]], name: str = "mt_grpo", turns: bool = True, **options: float
) -> Any:
    """The advantages of groups of samples (reward, rewards of the turns)."""
    rewards = [[reward for reward, _ in group] for group in groups]
    by_turn = [[each for _, each in group] for group in groups] if turns else ()
    tokens = [[1] * len(group) for group in groups]
    return advantages_of(ADVANTAGES.find(name).choose(options), GroupRewards(rewards, tokens, by_turn))


def test_two_turns_are_the_paper_s() -> None:
    """The first turn has a reward, for a call that has worked; the outcome is that of the answer."""
    outcomes, calls = [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]
    (got,) = advantages([[(o, [c, 0.0]) for o, c in zip(outcomes, calls, strict=True)]], turn_coef=0.5, eps=0.0)
    for values, outcome, call in zip(got, outcomes, calls, strict=True):
        final = (outcome - statistics.fmean(outcomes)) / statistics.stdev(outcomes)
        first = final + 0.5 * (call - statistics.fmean(calls)) / statistics.stdev(calls)
        assert values == pytest.approx([first, final])


def test_a_turn_has_what_it_and_later_ones_earn_among_the_samples_that_have_them() -> None:
    """Two samples have a second turn, one a third, which has nobody to be compared with; one has no turns at all."""
    (got,) = advantages([[(1.0, [0.0, 3.0]), (1.0, [2.0, 1.0, 9.0]), (1.0, [4.0]), (1.0, [])]], eps=0.0)
    half = 1 / 2**0.5  # (3 - 2) / std(3, 1)
    assert got[0] == pytest.approx([-1.0 + half, half]) and got[1] == pytest.approx([0.0 - half, -half, 0.0])
    assert got[2] == pytest.approx([1.0]) and got[3] == 0.0


@given(GROUPS, REWARDS)
def test_equal_rewards_of_turns_give_exactly_grpo(groups: list[list[tuple[float, list[float]]]], value: float) -> None:
    equal = [[(reward, [value] * len(turns)) for reward, turns in group] for group in groups]
    scalar = advantages(groups, "grpo", turns=False)
    assert advantages(groups, turns=False) == scalar
    for group, by_turn, values in zip(equal, advantages(equal), scalar, strict=True):
        assert by_turn == [[own] * len(turns) if turns else own for (_, turns), own in zip(group, values, strict=True)]


@given(GROUPS, st.randoms(use_true_random=False))
def test_the_order_of_a_group_makes_no_difference_and_turns_sum_to_nothing(
    groups: list[list[tuple[float, list[float]]]], rng: random.Random
) -> None:
    orders = [rng.sample(range(len(group)), len(group)) for group in groups]
    moved = [[group[i] for i in order] for group, order in zip(groups, orders, strict=True)]
    got = advantages(groups)
    for values, order, again in zip(got, orders, advantages(moved), strict=True):
        for place, index in enumerate(order):
            assert again[place] == pytest.approx(values[index], abs=1e-9)
    for group, values in zip(groups, got, strict=True):
        for turn in range(4):  # what a turn adds to the turns before it is centred over the samples that have it
            added = [
                own[turn] - (own[turn + 1] if turn + 1 < len(own) else outcome)
                for (_, turns), own, outcome in zip(
                    group, values, advantages([group], "grpo", turns=False)[0], strict=True
                )
                if turn < len(turns)
            ]
            assert sum(added) == pytest.approx(0.0, abs=1e-6)


def test_a_reward_of_a_turn_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not finite: \[1.0\], of turns: \[\[nan\]\]"):
        advantages([[(1.0, [float("nan")])]])
