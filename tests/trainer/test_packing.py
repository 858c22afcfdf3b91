"""Packing: every sequence exactly once, bounds respected, the same number of micro-batches everywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.trainer.packing import Patches, assign_to_ranks, partition_hash, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 64), max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_every_sequence_goes_to_one_rank_and_tokens_are_balanced(lengths: list[int], dp_size: int) -> None:
    parts = assign_to_ranks(lengths, dp_size)
    assert len(parts) == dp_size
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(64, 200), st.integers(1, 4), st.integers(1, 6))
def test_micro_batches_fit_and_are_equally_many(
    per_rank: list[list[int]], max_tokens: int, multiple_of: int, minimum: int
) -> None:
    plan = plan_micro_batches(per_rank, max_tokens, multiple_of, minimum)
    numbers = {len(rank) for rank in plan}
    assert len(numbers) == 1 and len(plan) == len(per_rank)
    number = numbers.pop()
    assert number >= minimum and number % multiple_of == 0
    # No more than first-fit-decreasing's known bound asks for, rounded up.
    needed = max([minimum, *(int(11 / 9 * -(-2 * sum(lengths) // max_tokens)) + 1 for lengths in per_rank)])
    assert number <= -(-needed // multiple_of) * multiple_of
    for lengths, rank in zip(per_rank, plan, strict=True):
        assert sorted(index for batch in rank for index in batch) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in batch) <= max_tokens for batch in rank)
        if len(lengths) >= number and sum(lengths) * 2 <= max_tokens:
            assert all(rank), "empty micro-batches although there are enough sequences"


def test_an_example() -> None:
    assert assign_to_ranks([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert plan_micro_batches([[5, 1, 4, 2], [3]], 6) == [[[0, 1], [2, 3]], [[0], []]]
    assert plan_micro_batches([[5, 1], []], 6, multiple_of=2, minimum=2) == [[[0], [1]], [[], []]]
    # Balancing two bins gives 4+2+2 > 7; first-fit decreasing, 4+3 and 3+2+2, is kept instead.
    assert plan_micro_batches([[4, 3, 3, 2, 2]], 7) == [[[0, 1], [2, 3, 4]]]


def test_sequences_of_equal_length_are_neighbours_in_a_micro_batch() -> None:
    assert plan_micro_batches([[2, 7, 2, 7, 3]], max_tokens=30) == [[[1, 3, 4, 0, 2]]]


def test_a_sequence_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 tokens does not fit in trainer.micro_batch_tokens=8"):
        plan_micro_batches([[3], [9]], 8)
    with pytest.raises(ValueError, match="at least one token"):
        assign_to_ranks([0], 1)


def test_the_hash_sees_order_and_nesting() -> None:
    plans = [[[0, 1], [2]], [[0], [1, 2]], [[1, 0], [2]], [[0, 1, 2]], [[0, 1], [2], []]]
    assert len({partition_hash(plan) for plan in plans}) == len(plans)
    assert partition_hash([[0, 1]]) == partition_hash(((0, 1),))


def test_patches_are_a_second_bound() -> None:
    lengths, patches = [[5, 4, 3, 2]], [[0, 40, 40, 8]]
    assert plan_micro_batches(lengths, 14) == [[[0, 1, 2, 3]]]
    (plan,) = plan_micro_batches(lengths, 14, patches=Patches(patches, 48))
    assert len(plan) == 2 and sorted(index for part in plan for index in part) == [0, 1, 2, 3]
    assert all(sum(patches[0][index] for index in part) <= 48 for part in plan)
    with pytest.raises(ValueError, match="a sequence with 40 vision patches does not fit"):
        plan_micro_batches(lengths, 14, patches=Patches(patches, 39))
