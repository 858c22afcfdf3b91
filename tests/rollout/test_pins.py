"""The right replicas keep their weights, in every order of evaluations, publications and losses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.pins import Pins

REPLICAS = range(4)


@pytest.mark.parametrize(
    ("serving", "count", "pinned"), [((0, 1, 2), 1, {2}), ((0, 1, 2), 5, {1, 2}), ((3,), 1, set()), ((0, 2), 0, set())]
)
def test_a_replica_is_left_for_training(serving: tuple[int, ...], count: int, pinned: set[int]) -> None:
    assert Pins().pin(serving, count) == pinned


def test_requests_of_an_evaluation_and_of_training_do_not_meet() -> None:
    pins = Pins()
    assert pins.closed_to(REPLICAS, background=True) == pins.closed_to(REPLICAS, background=False) == set()
    pins.pin(REPLICAS, 1)
    assert pins.closed_to(REPLICAS, background=True) == {0, 1, 2}
    assert pins.closed_to(REPLICAS, background=False) == {3}
    pins.forget(3)
    assert pins.closed_to(REPLICAS, background=True) == pins.closed_to(REPLICAS, background=False) == set()


def test_one_evaluation_at_a_time_has_pins() -> None:
    pins = Pins()
    pins.pin(REPLICAS, 1)
    with pytest.raises(ValueError, match=r"replicas \[3\] are pinned"):
        pins.pin(REPLICAS, 1)


@given(st.lists(st.sampled_from(["pin", "release", "begin", "end", "lose"]), max_size=30), st.integers(1, 3))
def test_training_never_gets_a_replica_that_has_missed_a_version(actions: list[str], count: int) -> None:
    """The model of the replicas' versions: a publication sets that of all but those left out, when it ends."""
    pins = Pins()
    version, versions, at_pin = 0, dict.fromkeys(REPLICAS, 0), 0
    left_out: frozenset[int] | None = None  # None: no publication is being made
    for action in actions:
        if action == "pin" and not pins.pinned and left_out is None:
            chosen = pins.pin(REPLICAS, count)
            at_pin = version
            assert all(versions[each] == version for each in chosen)
        elif action == "release":
            pins.release()
        elif action == "begin" and left_out is None:
            left_out = pins.leave_out()
            assert left_out == pins.pinned
        elif action == "end" and left_out is not None:
            version += 1
            versions |= {each: version for each in REPLICAS if each not in left_out}
            pins.published()
            left_out = None
        elif action == "lose" and left_out is None:
            pins.forget(3)
            versions[3] = version  # its replacement joins with the current weights
        assert all(versions[each] == at_pin for each in pins.pinned)
        trained = set(REPLICAS) - pins.closed_to(REPLICAS, background=False)
        assert trained and all(versions[each] == version for each in trained)
        if not pins.pinned and left_out is None:  # nobody is kept longer than needed
            assert {each for each in REPLICAS if versions[each] != version} == pins.reserved
