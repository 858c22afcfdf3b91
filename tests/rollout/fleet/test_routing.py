"""Routing: least-loaded, prefix affinity within its slack, exact outstanding counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.fleet.router import Router

events = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=40)


@given(replicas=st.integers(1, 5), slack=st.integers(0, 16), work=events)
def test_affinity_gives_way_only_beyond_the_slack(replicas: int, slack: int, work: list[tuple[int, int]]) -> None:
    router = Router(range(replicas), slack)
    home: dict[int, int] = {}
    for prefix, samples in work:
        before = router.load
        chosen = router.assign(prefix, samples)
        least = min(before.values())
        if prefix in home and before[home[prefix]] - least <= slack:
            assert chosen == home[prefix]
        else:
            assert before[chosen] == least
        home[prefix] = chosen
        assert router.load == {**before, chosen: before[chosen] + samples}


@given(replicas=st.integers(1, 4), work=events, order=st.randoms())
def test_everything_finished_leaves_no_load(replicas: int, work: list[tuple[int, int]], order: object) -> None:
    router = Router(range(replicas))
    open_work = [(prefix, router.assign(prefix, samples), samples) for prefix, samples in work]
    order.shuffle(open_work)  # type: ignore[attr-defined]
    for item in open_work:
        router.release(*item)
    assert set(router.load.values()) == {0}
    assert router.assign("new", 1) == 0


@given(groups=st.integers(1, 40), replicas=st.integers(1, 6))
def test_equal_groups_are_spread_evenly(groups: int, replicas: int) -> None:
    router = Router(range(replicas))
    for group in range(groups):
        router.assign(group, 8)
    assert max(router.load.values()) - min(router.load.values()) <= 8


def test_a_removed_replica_gets_nothing_and_may_come_back() -> None:
    router = Router([0, 1])
    assert router.assign("a", 4) == 0
    router.remove(0)
    assert [router.assign("a", 1) for _ in range(3)] == [1, 1, 1]
    router.release("a", 0, 4)
    router.add(0)
    assert router.load == {0: 0, 1: 3} and router.assign("b", 1) == 0
    with pytest.raises(ValueError, match="already"):
        router.add(0)


def test_without_a_replica_nothing_is_assigned() -> None:
    router = Router([0])
    router.assign("a", 4)
    router.remove(0)
    assert router.assign("a", 1) is None and router.assign("b", 1, number=3) is None and router.load == {}
    router.release("a", 0, 4)
    router.add(0)
    assert router.assign("a", 1) == 0 and router.load == {0: 1}


@given(replicas=st.integers(1, 5), work=events)
def test_a_number_alone_decides_where_a_group_goes(replicas: int, work: list[tuple[int, int]]) -> None:
    router = Router(range(replicas), slack=0)
    for number, (prefix, samples) in enumerate(work):
        assert router.assign(prefix, samples, number) == number % replicas


def test_finishing_more_than_was_assigned_is_refused() -> None:
    router = Router([0])
    router.assign("a", 1)
    with pytest.raises(ValueError, match="outstanding"):
        router.release("a", 0, 2)


def test_a_full_replica_gets_nothing() -> None:
    router = Router(range(3))
    assert router.assign("a", 4) == 0
    assert router.assign("a", 4, full={0}) == 1  # although the prompt is in the cache of 0
    assert router.assign("b", 1, number=4, full={1}) is None and router.assign("b", 1, number=4, full={0}) == 1
    before = router.load
    assert router.assign("c", 1, full={0, 1, 2}) is None and router.load == before


def test_a_dialogue_goes_on_near_its_beginning_unless_that_replica_is_busy_or_gone() -> None:
    router = Router([0, 1, 2], slack=2)
    assert router.assign("a", 1) == 0
    router.release("a", 0, 1)
    assert router.assign("b", 1, near=2) == 2  # although all are idle, and nobody else knows the prefix
    assert router.assign("b", 3, near=1) == 2  # outstanding requests tell more than what was
    assert router.assign("c", 1, near=2) == 0  # busier than the slack allows
    router.remove(1)
    assert router.assign("d", 1, near=1) == 0
    assert router.assign("e", 1, near=0, full={0}) == 2
