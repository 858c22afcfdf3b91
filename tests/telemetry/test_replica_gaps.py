"""The comparison of replicas at equal version lag."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.telemetry.monitor import ReplicaGap, compare_replicas


def test_a_replica_with_older_tokens_is_not_a_worse_one() -> None:
    """Both have 0.01 at lag 0 and 0.2 at lag 4; the second one is slow. By its mean it would be 13 times worse."""
    means = {0: {0: (1000, 0.01), 4: (100, 0.2)}, 1: {0: (100, 0.01), 4: (1000, 0.2)}}
    found = compare_replicas(means, 100)
    for gap in found.values():
        assert gap.tokens == 1100 and gap.gap == pytest.approx(gap.expected)
    assert found[1].gap > 6 * found[0].gap


def test_the_sick_one_is_named_and_the_other_is_not() -> None:
    found = compare_replicas({0: {0: (500, 0.9)}, 1: {0: (500, 0.01)}}, 100)
    assert found[0] == ReplicaGap(500, pytest.approx(0.9), pytest.approx(0.01))
    assert found[0].excess(0.03) == pytest.approx(30.0) and found[1].excess(0.03) == pytest.approx(0.01 / 0.9)


def test_a_second_sick_one_does_not_hide_the_first() -> None:
    means = {replica: {0: (500, 0.9 if replica < 2 else 0.01)} for replica in range(3)}
    excess = {replica: gap.excess(0.03) for replica, gap in compare_replicas(means, 100).items()}
    assert excess[0] > 4 and excess[1] > 4 and excess[2] < 1


def test_what_cannot_be_compared_is_left_out() -> None:
    assert compare_replicas({0: {0: (500, 0.9)}}, 100) == {}
    assert compare_replicas({0: {0: (500, 0.9)}, 1: {1: (500, 0.01)}}, 100) == {}, "no equal lag"
    assert compare_replicas({0: {0: (500, 0.9)}, 1: {0: (99, 0.01)}}, 100) == {}, "too few tokens of the other"
    few = compare_replicas({0: {0: (50, 0.9), 1: (60, 0.9)}, 1: {0: (500, 0.01), 1: (500, 0.01)}}, 100)
    assert list(few) == [0], "its own tokens of all lags count together"


@given(
    lags=st.dictionaries(st.integers(0, 5), st.floats(0.001, 0.5), min_size=1),
    shares=st.lists(st.lists(st.integers(0, 400), min_size=6, max_size=6), min_size=2, max_size=5),
)
def test_equal_replicas_have_what_is_expected_whatever_their_lags(
    lags: dict[int, float], shares: list[list[int]]
) -> None:
    means = {
        replica: {lag: (counts[lag], mean) for lag, mean in lags.items() if counts[lag]}
        for replica, counts in enumerate(shares)
    }
    for gap in compare_replicas(means, 50).values():
        assert gap.gap == pytest.approx(gap.expected)
