"""The problem sets: disjoint, sized as said, and solutions that say what the careless student would say."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.quickstart.problems import Addition, check_disjoint, make_splits, solutions

number = st.integers(10, 99)


@settings(deadline=None)
@given(number, number)
def test_careful_solution_is_right_and_careless_one_forgets_exactly_the_carry(a: int, b: int) -> None:
    item = Addition(a, b)
    careful, careless = (int(item.solution(careful=flag).split("{")[1].rstrip("}")) for flag in (True, False))
    assert careful == int(item.answer) == a + b
    assert careful - careless == (10 if (a % 10) + (b % 10) > 9 else 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 50))
def test_splits_share_no_pair_in_either_order(seed: int) -> None:
    splits = make_splits(seed)
    sets = [
        {frozenset((item.a, item.b)) for item in items} for items in (splits.warm_start, splits.train, splits.heldout)
    ]
    assert sum(len(each) for each in sets) == len(sets[0] | sets[1] | sets[2])
    assert len(splits.heldout) == 600 and len(splits.train) >= 950
    for items in (splits.warm_start, splits.train, splits.heldout):
        assert 0.74 < sum(item.has_carry for item in items) / len(items) < 0.76


@pytest.mark.parametrize("swap", [False, True])
def test_a_leak_is_found(swap: bool) -> None:
    splits = make_splits(0)
    stolen = splits.heldout[3]
    leak = Addition(stolen.b, stolen.a) if swap else stolen
    for leaky in (replace(splits, train=[*splits.train, leak]), replace(splits, warm_start=[leak])):
        with pytest.raises(AssertionError, match="share 1 problems"):
            check_disjoint(leaky)
    with pytest.raises(AssertionError, match="twice"):
        check_disjoint(replace(splits, heldout=[*splits.heldout, leak]))


def test_one_solution_in_four_remembers_the_carry() -> None:
    item = Addition(47, 35)
    assert [item.answer in text for text in solutions(item)].count(True) == 1
    assert item.solution(careful=True) == "ones 7+5=12, tens 4+3+1=8, \\boxed{82}"
    assert item.solution(careful=False) == "ones 7+5=12, tens 4+3=7, \\boxed{72}"


def test_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="pairs are left"):
        make_splits(0, heldout=4000)
