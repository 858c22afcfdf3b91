"""Where requests go, how many an engine gets at a time, and who waits: the next place goes to training first."""

import asyncio
import math
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.errors import NoReplicaLeft, ReplicaFailed
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.fleet.replica_table import Lease, Replica, ReplicaTable, State
from megarl.rollout.fleet.router import (
    DECREASE,
    ENDED_PER_INCREASE,
    FULL,
    PublicationHold,
    Router,
    adapt_limit,
    has_room,
)

PRESSED, CALM = EngineLoad(1.0, 10, 3), EngineLoad(0.5, 10, 0)
events = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=40)


class Routed:
    """A router of replicas that all serve."""

    def __init__(self, replicas: int, slack: int = 64) -> None:
        clients: dict[int, Any] = {index: object() for index in range(replicas)}
        self.table = ReplicaTable(clients, replaces=True)
        self.router = Router(self.table, PublicationHold(math.inf), slack=slack)

    def assign(self, prefix: Hashable, samples: int, number: int | None = None, near: int | None = None) -> int | None:
        lease = self.router.assign(prefix, samples, number, near)
        return None if lease is None else lease.replica.index

    @property
    def load(self) -> dict[int, int]:
        return {each.index: each.load for each in self.table.serving}

    def lose(self, index: int) -> None:
        self.table.lose(index, ReplicaFailed(index, "gone"))

    def bring(self, index: int) -> None:
        self.table.begin_sync()
        self.table.join(index)
        self.table.admit()


@given(replicas=st.integers(1, 5), slack=st.integers(0, 16), work=events)
def test_affinity_gives_way_only_beyond_the_slack(replicas: int, slack: int, work: list[tuple[int, int]]) -> None:
    routed = Routed(replicas, slack)
    home: dict[int, int] = {}
    for prefix, samples in work:
        before = routed.load
        chosen = routed.assign(prefix, samples)
        assert chosen is not None
        least = min(before.values())
        if prefix in home and before[home[prefix]] - least <= slack:
            assert chosen == home[prefix]
        else:
            assert before[chosen] == least
        home[prefix] = chosen
        assert routed.load == {**before, chosen: before[chosen] + samples}


@given(replicas=st.integers(1, 4), work=events, order=st.randoms())
def test_everything_finished_leaves_no_load(replicas: int, work: list[tuple[int, int]], order: Any) -> None:
    routed = Routed(replicas)
    open_work = [(prefix, routed.router.assign(prefix, samples), samples) for prefix, samples in work]
    order.shuffle(open_work)
    for prefix, lease, samples in open_work:
        assert lease is not None
        routed.router.release(prefix, lease, samples)
    assert set(routed.load.values()) == {0} and not routed.router._home and not routed.router._open
    assert routed.assign("new", 1) == 0


def test_a_lost_replica_gets_nothing_and_comes_back_idle() -> None:
    routed = Routed(2)
    lease = routed.router.assign("a", 4)
    assert lease is not None and lease.replica.index == 0
    routed.lose(0)
    assert [routed.assign("a", 1) for _ in range(3)] == [1, 1, 1]
    routed.bring(0)
    routed.router.release("a", lease, 4)
    assert routed.load == {0: 0, 1: 3} and routed.assign("b", 1) == 0


@given(replicas=st.integers(1, 5), work=events)
def test_a_number_alone_decides_where_a_group_goes(replicas: int, work: list[tuple[int, int]]) -> None:
    routed = Routed(replicas, slack=0)
    for number, (prefix, samples) in enumerate(work):
        assert routed.assign(prefix, samples, number) == number % replicas


def test_finishing_more_than_was_assigned_is_refused() -> None:
    routed = Routed(1)
    lease = routed.router.assign("a", 1)
    assert lease is not None
    with pytest.raises(ValueError, match="outstanding"):
        routed.router.release("a", lease, 2)


def test_a_full_replica_gets_nothing_unless_the_requests_have_begun() -> None:
    routed = Routed(3)

    def limits(*values: float) -> None:
        for each, limit in zip(routed.table, values, strict=True):
            each.limit = limit

    assert routed.assign("a", 4) == 0
    limits(4, math.inf, math.inf)
    assert routed.assign("a", 4) == 1  # although the prompt is in the cache of 0
    limits(4, 4, math.inf)
    assert routed.assign("b", 1, number=4) is None and routed.assign("b", 1, number=5) == 2
    limits(4, 4, 1)
    before = routed.load
    assert routed.assign("c", 1) is None and routed.load == before
    assert routed.router.assign("c", 1, any_room=True) is not None


def test_a_dialogue_goes_on_near_its_beginning_unless_that_replica_is_busy_or_gone() -> None:
    routed = Routed(3, slack=2)
    lease = routed.router.assign("a", 1)
    assert lease is not None and lease.replica.index == 0
    routed.router.release("a", lease, 1)
    assert routed.assign("b", 1, near=2) == 2  # although all are idle, and nobody else knows the prefix
    assert routed.assign("b", 3, near=1) == 2  # outstanding requests tell more than what was
    assert routed.assign("c", 1, near=2) == 0  # busier than the slack allows
    routed.lose(1)
    assert routed.assign("d", 1, near=1) == 0


def replica(load: int = 0) -> Replica:
    return Replica(0, State.READY, load=load)


def test_there_is_no_limit_before_memory_is_short() -> None:
    """A full batch and a full cache are no pressure by themselves."""
    one = replica(1000)
    for load in (CALM, EngineLoad(1.0, 256, 0), EngineLoad(FULL - 0.01, 256, 100)):
        adapt_limit(one, load, 8)
    assert one.limit == math.inf and has_room(one, 10**9)


def test_pressure_lowers_the_limit_once_until_the_requests_above_it_have_ended() -> None:
    one = replica(100)
    adapt_limit(one, PRESSED, 0)
    assert one.limit == 100 * DECREASE == 75
    for one.load in (100, 90, 76):
        adapt_limit(one, PRESSED, 5)
        assert one.limit == 75
    one.load = 72
    adapt_limit(one, PRESSED, 0)
    assert one.limit == 54
    adapt_limit(one, CALM, 16)
    assert one.limit == 54 + 16 / ENDED_PER_INCREASE
    one.load = 50
    assert has_room(one, 6) and not has_room(one, 7)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 50)), max_size=60), st.integers(1, 10**6))
def test_an_idle_replica_always_has_room_and_no_limit_is_below_one(
    reports: list[tuple[bool, int, int]], more: int
) -> None:
    one = replica()
    for pressed, in_flight, ended in reports:
        before, one.load = one.limit, in_flight
        adapt_limit(one, PRESSED if pressed else CALM, ended)
        one.load = 0
        assert one.limit >= 1 and has_room(one, more)
        if pressed:
            assert one.limit in (before, max(in_flight * DECREASE, 1.0))
        else:
            assert one.limit == before + ended / ENDED_PER_INCREASE


@given(st.integers(16, 400), st.integers(1, 16))
def test_the_limit_stays_near_what_the_engine_can_hold(capacity: int, group: int) -> None:
    """An engine that is pressed above `capacity` requests, and groups that always wait: sawtooth below it."""
    one, seen = replica(), []
    for step in range(3000):
        while step and has_room(one, group) and one.load < 4 * capacity:
            one.load += group
        ended = min(one.load, group)
        adapt_limit(one, PRESSED if one.load > capacity else CALM, ended)
        one.load -= ended
        if step > 2000:
            seen.append(one.load + ended)
    assert max(seen) <= capacity + 2 * group + 2
    assert sum(seen) / len(seen) >= 0.6 * capacity - 2 * group


class Busy(Routed):
    """One replica with one request, which has reported that it has no room for another."""

    def __init__(self) -> None:
        super().__init__(1)
        lease = self.router.assign("first", 1)
        assert lease is not None
        self.first: Lease = lease
        self.router.reported("first", lease, 0, PRESSED)

    def place(self, name: str, *, background: bool = False, begun: bool = False) -> asyncio.Task[Lease | None]:
        context = RequestContext(name)
        return asyncio.ensure_future(self.router.place(context, 1, int(begun), background=background, timeout_s=5.0))


async def test_training_is_placed_before_an_evaluation_that_came_first() -> None:
    busy = Busy()
    order: list[str] = []
    waiting = {name: busy.place(name, background=name == "evaluation") for name in ("evaluation", "early", "late")}
    for name, task in waiting.items():
        task.add_done_callback(lambda _, name=name: order.append(name))
    await asyncio.sleep(0.01)
    assert order == []
    for done in ("first", "early", "late"):
        busy.router.release(done, busy.first, 1)
        await asyncio.sleep(0.01)
    assert order == ["early", "late", "evaluation"]


async def test_room_that_comes_while_another_one_queues_up_is_used_at_once() -> None:
    """In one turn of the event loop the first one looks, the replica becomes idle, and another one looks."""
    busy = Busy()
    first = busy.place("first in line")
    asyncio.get_running_loop().call_soon(busy.router.release, "first", busy.first, 1)
    second = busy.place("second")
    assert await asyncio.wait_for(first, 1) is not None
    busy.router.release("first in line", busy.first, 1)
    assert await asyncio.wait_for(second, 1) is not None


@pytest.mark.parametrize("turns", range(4))
async def test_whoever_is_cancelled_while_room_comes_does_not_take_it(turns: int) -> None:
    busy = Busy()
    waiting = [busy.place(f"{number}") for number in range(3)]
    await asyncio.sleep(0.01)
    busy.router.reported("first", busy.first, 0, PRESSED)
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting, timeout=1)
    assert all(task.cancelled() for task in waiting)
    busy.router.release("first", busy.first, 1)
    assert await busy.place("next") is not None


async def test_a_report_wakes_only_those_that_are_next(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy()
    tasks = [busy.place(f"{number}", background=number % 2 == 1) for number in range(20)]
    await asyncio.sleep(0.01)
    looks: list[object] = []
    look = busy.router._assign_next
    monkeypatch.setattr(busy.router, "_assign_next", lambda *args: looks.append(args) or look(*args))
    busy.router.reported("first", busy.first, 0, PRESSED)
    await asyncio.sleep(0.01)
    assert len(looks) == 2  # one of training, one of the evaluation
    for task in tasks:
        task.cancel()


async def test_whoever_has_no_replica_left_is_told_so_and_does_not_wait_for_room() -> None:
    busy = Busy()
    waiting = busy.place("waits for room")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    busy.lose(0)
    for task in (waiting, busy.place("training", begun=True), busy.place("evaluation", background=True)):
        with pytest.raises(NoReplicaLeft, match="gone"):
            await task
    busy.table.expects = True  # a trainer can be asked for one
    waiting = busy.place("training", begun=True)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    busy.bring(0)
    assert await waiting is not None
