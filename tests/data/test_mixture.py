"""Drawing from several sets: exact shares, every draw of a set once and in order, and the same after a resume."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.mixture import Cursor, Mixture

GROUPS = 300
WEIGHTS = st.lists(st.sampled_from([0.0, 1e-3, 0.1, 0.3, 1 / 3, 0.7, 1.0, 2.5, 1e6]), min_size=2, max_size=5).filter(
    any
)
SEEDS = st.integers(0, 2**63)


def mixture(weights: Sequence[float], seed: int = 0) -> Mixture:
    return Mixture({f"set{index}": weight for index, weight in enumerate(weights)}, seed)


def named(weights: Sequence[float]) -> dict[str, float]:
    return {f"set{index}": weight for index, weight in enumerate(weights)}


@given(WEIGHTS, SEEDS)
def test_each_set_has_its_share_of_every_prefix_and_its_draws_in_order(weights: list[float], seed: int) -> None:
    mixed, drawn = mixture(weights, seed), [0] * len(weights)
    for group in range(GROUPS):
        index, draw = mixed.at(group)
        assert draw == drawn[index]  # so no prompt of the set's epoch is left out or comes twice
        drawn[index] += 1
        for count, weight in zip(drawn, weights, strict=True):
            assert abs(count - (group + 1) * weight / sum(weights)) < len(weights)
    assert [count for count, weight in zip(drawn, weights, strict=True) if not weight and count] == []


@given(st.lists(st.tuples(st.integers(1, 60), WEIGHTS.filter(lambda w: len(w) == 3)), max_size=5), SEEDS)
def test_changes_of_the_weights_keep_the_draws_in_order_and_survive_a_resume(
    changes: list[tuple[int, list[float]]], seed: int
) -> None:
    mixed, start = mixture([1, 1, 1], seed), 0
    before: list[tuple[int, int]] = []
    for length, weights in changes:
        before += [mixed.at(group) for group in range(start, start + length)]
        start += length
        mixed.reweight(start, named(weights))
        assert mixed.weights == named(weights)
    draws = [mixed.at(group) for group in range(start + 100)]
    assert draws[:start] == before  # what was drawn stays what it was
    for index in range(3):
        own = [draw for which, draw in draws if which == index]
        assert own == list(range(len(own)))
    resumed = mixture([1, 1, 1], seed)
    resumed.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    assert [resumed.at(group) for group in reversed(range(start + 100))] == draws[::-1]
    assert resumed.state_dict() == mixed.state_dict()


@given(st.lists(st.tuples(st.integers(1, 60), WEIGHTS.filter(lambda w: len(w) == 3)), max_size=5), SEEDS, st.data())
def test_what_is_forgotten_changes_no_later_draw(
    changes: list[tuple[int, list[float]]], seed: int, data: st.DataObject
) -> None:
    mixed, start = mixture([1, 1, 1], seed), 0
    for length, weights in changes:
        start += length
        mixed.reweight(start, named(weights))
    draws = [mixed.at(group) for group in range(start + 100)]
    first = data.draw(st.integers(0, start + 50))
    mixed.forget(first)
    assert [mixed.at(group) for group in range(first, start + 100)] == draws[first:]
    assert sum(span["start"] <= first for span in mixed.state_dict()["spans"]) == 1
    resumed = mixture([1, 1, 1], seed)
    resumed.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    for each in (mixed, resumed):
        each.reweight(start + 60, named([0.0, 1.0, 2.5]))
    assert [resumed.at(group) for group in range(first, start + 99)] == [
        mixed.at(group) for group in range(first, start + 99)
    ]


def test_a_state_of_before_anything_was_forgotten_is_read() -> None:
    mixed = mixture([1, 2], 3)
    state = mixed.state_dict()
    del state["drawn"]
    resumed = mixture([2, 1], 3)
    resumed.load_state_dict(state)
    assert [resumed.at(group) for group in range(30)] == [mixed.at(group) for group in range(30)]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=3), SEEDS)
def test_no_prompt_comes_twice_in_an_epoch_of_its_set(sizes: list[int], seed: int) -> None:
    mixed = mixture([1.0, 0.25, 3.0][: len(sizes)], seed)
    cursors = [Cursor(size, seed + index, shuffle=True) for index, size in enumerate(sizes)]
    drawn = Counter((index, *cursors[index].at(draw)) for index, draw in (mixed.at(group) for group in range(GROUPS)))
    assert max(drawn.values()) == 1


def test_seeds_shift_the_order_and_a_zero_weight_ends_a_set() -> None:
    orders = {tuple(mixture([3, 1], seed).at(group)[0] for group in range(8)) for seed in range(20)}
    assert len(orders) == 4  # where in each four groups the second set comes
    mixed = mixture([1, 1])
    mixed.reweight(4, named([0, 1]))
    assert {mixed.at(group)[0] for group in range(4, 40)} == {1}
    mixed.reweight(4, named([1, 0]))  # nothing has been drawn since: the later word counts
    assert {mixed.at(group)[0] for group in range(4, 40)} == {0}


def test_the_order_is_pinned() -> None:
    """A change of it would make saved runs draw other prompts after a resume."""
    mixed = mixture([0.5, 0.3, 0.2], 7)
    assert [mixed.at(group) for group in range(10)] == PINNED


PINNED = [(1, 0), (0, 0), (2, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (2, 1), (0, 4)]


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_choose_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 0 and not all 0"):
        mixture(weights)


def test_other_sets_and_other_seeds_are_refused() -> None:
    state = mixture([1, 1], 1).state_dict()
    for other in (mixture([1, 1, 1], 1), mixture([1, 1], 2)):
        with pytest.raises(ValueError, match=r"resume with data\.sets and run\.seed of the saved run"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"weights of \['set0'\], but the sets are"):
        mixture([1, 1]).reweight(3, {"set0": 1.0})
    changed = mixture([1, 1])
    changed.reweight(10, named([1, 2]))
    with pytest.raises(ValueError, match="group 9 cannot change: those from group 10 on are set"):
        changed.reweight(9, named([2, 1]))


def test_long_runs_are_drawn_at_once() -> None:
    """The billionth group costs what the first one costs, and the numbers stay exact."""
    mixed = mixture([1 / 3, 0.1, 1e-3])
    first = 10**15
    seen = [mixed.at(group) for group in range(first, first + 1000)]
    for index in range(3):
        own = [draw for which, draw in seen if which == index]
        assert all(later - earlier == 1 for earlier, later in itertools.pairwise(own))


@given(
    st.lists(st.tuples(st.integers(1, 40), WEIGHTS.filter(lambda w: len(w) == 3)), min_size=1, max_size=5),
    SEEDS,
    st.integers(0, 150),
)
def test_a_schedule_is_followed_and_a_resume_goes_on_with_it(
    parts: list[tuple[int, list[float]]], seed: int, resumed_at: int
) -> None:
    starts = list(itertools.accumulate([0, *(length for length, _ in parts)]))[:-1]
    schedule = [(start, named(weights)) for start, (_, weights) in zip(starts, parts, strict=True)]
    mixed = mixture([1, 1, 1], seed)
    mixed.follow(0, schedule)
    draws = [mixed.at(group) for group in range(200)]
    for group, (which, _) in enumerate(draws):
        in_force = [weights for start, weights in schedule if start <= group][-1]
        assert in_force[f"set{which}"] > 0
    for index in range(3):
        own = [draw for which, draw in draws if which == index]
        assert own == list(range(len(own)))
    resumed = mixture([1, 1, 1], seed)
    resumed.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
    resumed.follow(resumed_at, schedule)
    assert [resumed.at(group) for group in range(200)] == draws


def test_a_schedule_that_has_changed_applies_from_the_first_group_that_was_not_drawn() -> None:
    mixed = mixture([1, 1], 0)
    mixed.follow(0, [(0, named([1, 0])), (10, named([0, 1])), (50, named([1, 1]))])
    before = [mixed.at(group) for group in range(20)]
    mixed.follow(20, [(0, named([1, 0])), (30, named([0, 1]))])
    assert [mixed.at(group) for group in range(20)] == before
    assert [mixed.at(group)[0] for group in range(20, 60)] == [0] * 10 + [1] * 30
    with pytest.raises(ValueError, match="no weights are set for group 2"):
        mixture([1, 1], 0).follow(2, [(3, named([1, 1]))])
