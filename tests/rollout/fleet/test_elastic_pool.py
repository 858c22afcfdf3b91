"""Draining, removing and adding replicas without processes, with responses under way."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import tests.support.pool.ray_token  # noqa: F401  # isort: skip  # before Ray is imported

from megarl.common.errors import NoPlace, ReplicaFailed, RolloutError
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.engine.placement import HeldDevices
from megarl.rollout.engine.replica import ReplicaStatus
from megarl.rollout.engine.replica_start import EndedReplica
from megarl.rollout.fleet import elastic_pool
from megarl.rollout.fleet.elastic_pool import ElasticPool
from megarl.rollout.fleet.engine_pool import EnginePool
from tests.support.engines.fake_replicas import FakeReplica, Method, ScriptedReplica, answered, fleet_of, requests

LONG = GenerateRequest("x", [1, 2], SamplingSpec(10**6, 1.0, (9,)), seed=7)


class Pool:
    """An elastic pool whose engines start at once, or fail with the errors of `failing`, one after the other."""

    def __init__(self, fleet: EnginePool, room: int = 9, rpc_s: float = 120.0, *, fixed: bool = False) -> None:
        self.room, self.failing = room, list[Exception]()
        self.may_place, self.may_start = asyncio.Event(), asyncio.Event()
        self.may_place.set()
        self.may_start.set()
        self.places: Callable[[], int] = lambda: self.room
        self.ended: list[Any] = []
        self.messages: list[str] = []
        self.elastic = ElasticPool(
            fleet,
            TimeoutsConfig(rpc_s=rpc_s),
            self._start,
            self.ended.append,
            self._look,
            self.messages.append,
            fixed=fixed,
        )
        self.elastic.open()

    def _look(self) -> int:
        return self.places()

    async def _start(self, index: int, placed: Callable[[], object]) -> Any:
        await asyncio.sleep(0)
        if self.failing:
            raise self.failing.pop(0)
        await self.may_place.wait()
        self.room -= 1
        placed()
        await self.may_start.wait()
        return FakeReplica(index)


async def status() -> ReplicaStatus:
    """The answer of a replica of version 4 with three running requests and two that wait."""
    return ReplicaStatus(HeldDevices("replica", "node-a", ("GPU-1",)), "4", 3, 2)


async def publish(fleet: EnginePool) -> list[int]:
    """A publication of the weights; return the replicas that got them."""
    await fleet.begin_sync()
    members = fleet.members
    fleet.admit_joining()
    return members


async def begun(fleet: EnginePool, replica: ScriptedReplica) -> asyncio.Task[list[GenerateResult]]:
    """A response that `replica` has made tokens of."""
    task = asyncio.create_task(fleet.generate(RequestContext("g", home=0), [LONG]))
    while len(replica.reported) < 4:
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("how", ["drain", "remove"])
async def test_a_response_goes_on_elsewhere_from_its_last_token_and_does_not_count_as_lost(how: str) -> None:
    first, second = ScriptedReplica(5, 10**6, None), ScriptedReplica(6, 1, "stop")
    fleet = fleet_of({5: first, 6: second}, interval_s=0.01)
    pool = Pool(fleet)
    response = await begun(fleet, first)
    done = await (pool.elastic.drain(5) if how == "drain" else pool.elastic.remove(5))
    assert "1 responses continue elsewhere" in done
    [result] = await response
    moved = len(result.response_ids) - 2
    assert result.response_ids == [5] * (moved - 2) + [7, 7, 6, 6] and result.finish_reason == "stop"
    assert [len(request.prompt_ids) for request in second.asked] == [2 + moved]
    assert result.replica == 6 and result.lost_replicas == 0
    assert len(first.ended) == 1, "the last tokens were not asked for"
    assert fleet.lost == {} and fleet.serving == [6]
    assert await publish(fleet) == ([5, 6] if how == "drain" else [6])
    assert fleet.serving == [6] and pool.ended == ([] if how == "drain" else [first])
    assert (5 in fleet.table) is (how == "drain")


async def test_no_engine_starts_or_ends_while_the_trainer_may_have_its_gpu() -> None:
    fleet = fleet_of({0: FakeReplica(0), 1: FakeReplica(1)})
    pool = Pool(fleet, fixed=True)
    for change in (pool.elastic.add(1), pool.elastic.remove(1)):
        with pytest.raises(RolloutError, match=r"rollout\.share_gpus.* resume it with another rollout\.replicas"):
            await change
    fleet.table.missing = 1
    await pool.elastic.tend()
    assert pool.elastic._growth is None and pool.room == 9
    assert "replica 1 is drained" in await pool.elastic.drain(1)


async def test_a_removed_replica_ends_after_the_publication_that_is_being_made() -> None:
    replicas = {0: FakeReplica(0), 1: FakeReplica(1)}
    fleet = fleet_of(replicas)
    pool = Pool(fleet)
    await fleet.begin_sync()
    assert "ends after the current publication" in await pool.elastic.remove(1)
    await asyncio.sleep(2 * elastic_pool.LOOK_S)
    assert fleet.members == [0, 1] and pool.ended == []
    fleet.admit_joining()
    await asyncio.sleep(2 * elastic_pool.LOOK_S)
    assert pool.ended == [replicas[1]] and fleet.members == fleet.serving == [0]
    with pytest.raises(RolloutError, match="there is no replica 1; the replicas are 0"):
        await pool.elastic.drain(1)


async def test_a_removed_replica_is_not_restarted_when_its_publication_fails() -> None:
    replicas = {0: FakeReplica(0), 1: FakeReplica(1)}
    fleet = fleet_of(replicas, FakeReplica(0))
    pool = Pool(fleet)
    await fleet.begin_sync()
    await pool.elastic.remove(1)
    await fleet.restart([0, 1])
    assert fleet.members == [0], "the repeated sync would wait for it"
    fleet.admit_joining()
    await asyncio.sleep(2 * elastic_pool.LOOK_S)
    assert pool.ended == [replicas[1]] and fleet.serving == [0]


async def test_added_replicas_serve_after_the_next_publication_and_not_before() -> None:
    fleet = fleet_of({0: FakeReplica(0)})
    pool = Pool(fleet)
    await fleet.begin_sync()
    assert "replicas 1, 2 joins the pool with the next publication" in await pool.elastic.add(2)
    fleet.admit_joining()
    assert fleet.serving == [0] and fleet.idle == [1, 2], "they took no part in that publication"
    assert await publish(fleet) == fleet.serving == [0, 1, 2] and fleet.idle == []
    answers = await asyncio.gather(*(fleet.generate(RequestContext(group), requests(group)) for group in range(3)))
    assert {answered(each)[0][0] for each in answers} == {"0", "1", "2"}


async def test_all_others_lost_while_a_new_one_waits_for_its_weights_asks_for_a_publication() -> None:
    fleet = fleet_of({0: FakeReplica(0)})
    fleet.expect_publication(True)
    await Pool(fleet).elastic.add(1)
    fleet.table.lose(0, ReplicaFailed(0, "replica 0 died"))
    assert fleet.needs_publication == "replica 0 died"
    await fleet.begin_sync()
    fleet.admit_joining()
    assert fleet.serving == [0, 1]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda elastic: elastic.drain(7), "there is no replica 7; the replicas are 0, 1"),
        (lambda elastic: elastic.remove(-1), "there is no replica -1; the replicas are 0, 1"),
        (lambda elastic: elastic.undrain(0), "replica 0 is not drained; it is serving"),
        (lambda elastic: elastic.drain(1), "replica 1 is already drained"),
        (lambda elastic: elastic.drain(0), "replica 0 cannot be drained: no other replica serves training now"),
        (lambda elastic: elastic.remove(0), "replica 0 cannot be removed: no other replica serves training now"),
        (lambda elastic: elastic.add(0), "cannot add 0 engines: give a number of at least 1"),
        (lambda elastic: elastic.add(3), "cannot add 3 engines: Ray has room for 2. Remove others"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_changes_nothing(
    ask: Callable[[ElasticPool], Awaitable[str]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_pool, "ROOM_S", 0.0)
    fleet = fleet_of({0: FakeReplica(0), 1: FakeReplica(1)})
    pool = Pool(fleet, room=2)
    await pool.elastic.drain(1)
    with pytest.raises(RolloutError, match=message):
        await ask(pool.elastic)
    assert fleet.serving == [0] and fleet.members == [0, 1] and len(list(fleet.table)) == 2


async def test_an_engine_that_does_not_start_is_named_and_the_others_join() -> None:
    fleet = fleet_of({0: FakeReplica(0)})
    pool = Pool(fleet)
    pool.failing = [ReplicaFailed(1, "replica 1 failed to start: out of memory")]
    with pytest.raises(RolloutError, match=r"1 of 2 engines did not start: .*out of memory; replica 2 joins"):
        await pool.elastic.add(2)
    assert await publish(fleet) == [0, 2] and fleet.idle == []


async def test_a_replica_without_a_place_leaves_the_pool_and_comes_back_under_a_new_number() -> None:
    """The loss of its node is such a case. With no other replica it would be the end of the run."""

    async def nowhere(index: int, old: Any) -> Any:
        raise NoPlace(index, f"no node has room for replica {index}")

    fleet = fleet_of({0: FakeReplica(0), 1: FakeReplica(1)})
    fleet._restart = nowhere  # type: ignore[assignment]
    pool = Pool(fleet, room=0)
    await fleet.begin_sync()
    await fleet.restart([1])
    assert fleet.members == [0] and fleet.lost == {} and fleet.table.missing == 1
    fleet.admit_joining()
    await pool.elastic.tend()
    await pool.elastic.tend()
    [message] = pool.messages
    assert "continues with 1 engine; 1 lost, which will be replaced as soon as there is room" in message
    pool.room = 4
    pool.elastic._look_at = 0.0
    await asyncio.sleep(0.05)  # in which the look that found no place ends
    await pool.elastic.tend()
    while fleet.table.missing:
        await asyncio.sleep(0.01)
    assert pool.room == 3 and "replaced lost engines: 1" in pool.messages[-1]
    assert await publish(fleet) == fleet.serving == [0, 2]
    with pytest.raises(NoPlace, match="no node has room for replica 0"):
        await fleet.restart([0, 2])


async def test_a_place_that_is_free_is_given_once() -> None:
    """Engines are added by hand and after a loss at the same time; until Ray has placed one, its place looks free."""
    fleet = fleet_of({0: FakeReplica(0)})
    fleet.table.missing = 1
    pool = Pool(fleet, room=3)
    pool.may_place.clear()
    pool.may_start.clear()
    added = [asyncio.create_task(pool.elastic.add(1)) for _ in range(2)]
    await pool.elastic.tend()
    while fleet.table.unplaced < 3:
        await asyncio.sleep(0.01)
    fleet.table.missing += 1
    assert await pool.elastic._reserve(1, 1) == ([], 0), "Ray says 3, and all of them are given"
    pool.may_place.set()
    while fleet.table.unplaced:
        await asyncio.sleep(0.01)
    pool.room = 2
    assert await pool.elastic._reserve(3, 3) == ([], 2), "engines that have their place are Ray's to count"
    pool.may_start.set()
    assert all("joins the pool" in done for done in await asyncio.gather(*added))
    assert await publish(fleet) == [0, 1, 2, 3]


async def test_two_changes_at_once_do_not_take_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_pool, "ROOM_S", 0.1)
    monkeypatch.setattr(elastic_pool, "LOOK_S", 0.02)
    fleet = fleet_of({0: FakeReplica(0)})
    pool = Pool(fleet, room=1)
    pool.may_place.clear()
    ends = asyncio.gather(*(pool.elastic.add(1) for _ in range(2)), return_exceptions=True)
    await asyncio.sleep(0.5)
    pool.may_place.set()
    refused, done = sorted(map(str, await ends))
    assert "cannot add 1 engine: Ray has room for 0 besides 1 that are being started" in refused
    assert done == "replica 1 joins the pool with the next publication of the weights"
    assert pool.room == 0 and fleet.table.unplaced == 0


async def test_a_look_for_places_that_ray_does_not_answer_is_bounded_and_made_once_at_a_time() -> None:
    looks, answer = [], threading.Event()

    def hang() -> int:
        looks.append(None)
        answer.wait(30)
        return 9

    fleet = fleet_of({0: FakeReplica(0)})
    pool = Pool(fleet, rpc_s=0.02)
    pool.places = hang
    try:
        for _ in range(3):
            with pytest.raises(RolloutError, match=r"the rollout controller waited 0 s \(timeouts.rpc_s\) for Ray"):
                await pool.elastic.add(1)
        assert len(looks) == 1, "each would hold a thread"
    finally:
        answer.set()
    while len(looks) == 1:  # an answer may need longer than the bound on a busy machine
        with suppress(RolloutError):
            assert "replica 1 joins" in await pool.elastic.add(1)
    assert fleet.table.unplaced == 0


async def test_a_look_for_places_that_fails_is_reported_and_tried_again() -> None:
    def broken() -> int:
        raise ConnectionError("Ray's head is gone")

    fleet = fleet_of({0: FakeReplica(0)})
    fleet.table.missing = 1
    pool = Pool(fleet)
    pool.places = broken
    await pool.elastic.tend()
    while len(pool.messages) < 2:
        await asyncio.sleep(0.01)
    assert pool.messages[1] == "engines that were lost could not be started again: Ray's head is gone"
    pool.places, pool.elastic._look_at = lambda: 1, 0.0
    await pool.elastic.tend()
    while fleet.table.missing:
        await asyncio.sleep(0.01)
    assert pool.elastic._failures == 0


async def test_the_list_names_each_state_and_does_not_wait_for_a_replica_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic_pool, "STATUS_S", 0.05)

    async def silent() -> ReplicaStatus:
        await asyncio.sleep(9)
        raise AssertionError

    replicas = {index: FakeReplica(index) for index in range(5)}
    for index, replica in replicas.items():
        replica.status = Method(silent if index == 2 else status)  # type: ignore[attr-defined]
    fleet = fleet_of(replicas)
    pool = Pool(fleet)
    fleet.table.lose(2, ReplicaFailed(2, "it hangs"))
    await pool.elastic.drain(1)
    fleet.table.reserve(1)
    reports = await pool.elastic.reports()
    assert [(each.replica, each.state) for each in reports] == [
        (0, "serving"), (1, "drained"), (2, "lost"), (3, "serving"), (4, "serving"), (5, "starting"),
    ]  # fmt: skip
    known = reports[0]
    assert (known.host, known.devices, known.version, known.running, known.waiting) == (
        "node-a", ("GPU-1",), "4", 3, 2,
    )  # fmt: skip
    assert (reports[2].host, reports[5].version) == ("", "")


async def test_before_the_trainer_has_begun_nothing_is_changed() -> None:
    """A new controller does not know yet which replicas serve."""
    fleet = fleet_of({0: FakeReplica(0), 1: FakeReplica(1)})
    pool = Pool(fleet)
    pool.elastic._has_trainer = False
    for change in (pool.elastic.drain, pool.elastic.undrain, pool.elastic.remove, pool.elastic.add):
        with pytest.raises(RolloutError, match="the trainer does not use the pool"):
            await change(1)
    assert fleet.serving == [0, 1] and not pool.ended


async def test_a_replica_that_ended_with_the_old_controller_is_lost_listed_and_can_be_removed() -> None:
    sound: Any = FakeReplica(0)
    sound.status = Method(status)
    fleet = fleet_of({0: sound, 1: EndedReplica(1)})
    await fleet.take_over(in_sync=False)
    assert fleet.serving == [0] and "has ended with the controller" in str(fleet.lost[1])
    pool = Pool(fleet)
    assert [report.state for report in await pool.elastic.reports()] == ["serving", "lost"]
    assert "its engine has ended" in await pool.elastic.remove(1)
    assert fleet.members == [0] and isinstance(pool.ended[0], EndedReplica)


async def test_a_replica_of_the_publication_in_which_the_old_controller_died_ends_after_it() -> None:
    fleet = fleet_of({0: FakeReplica(0), 1: FakeReplica(1)})
    await fleet.take_over(in_sync=True)
    pool = Pool(fleet)
    assert "its engine ends after the current publication" in await pool.elastic.remove(1)
    await asyncio.sleep(0.05)
    assert fleet.members == [0, 1] and not pool.ended
    fleet.admit_joining()
    while not pool.ended:
        await asyncio.sleep(0.01)
    assert fleet.members == [0]


async def test_a_lost_replica_is_removed_while_a_publication_asks_whether_it_is_sound() -> None:
    hung, asked = FakeReplica(1), asyncio.Event()

    async def reset() -> None:
        asked.set()
        await asyncio.sleep(0.1)
        raise ReplicaFailed(1, "gone")

    hung.reset = Method(reset)
    fleet = fleet_of({0: FakeReplica(0), 1: hung})
    fleet.table.lose(1, ReplicaFailed(1, "hangs"))
    publication = asyncio.create_task(fleet.begin_sync())
    await asked.wait()
    fleet.table.leave(1)
    fleet.table.lose(1, ReplicaFailed(1, "gone"))
    await publication
    fleet.admit_joining()
    assert fleet.serving == [0]


async def test_a_replica_that_fails_in_a_publication_leaves_it_at_once_and_a_new_one_joins_the_next() -> None:
    """Nobody waits for the new engine. The responses of the old one continue elsewhere from their last tokens."""
    first, second = ScriptedReplica(5, 10**6, None), ScriptedReplica(6, 1, "stop")

    async def never(index: int, old: Any) -> Any:
        raise AssertionError("nobody may wait for a restart")

    fleet = fleet_of({5: first, 6: second}, interval_s=0.01)
    fleet._restart = never  # type: ignore[assignment]
    pool = Pool(fleet)
    response = await begun(fleet, first)
    await fleet.begin_sync()
    await pool.elastic.replace_later([5])
    assert fleet.members == [6] and pool.ended == [first] and fleet.table.missing == 1
    fleet.admit_joining()
    [result] = await response
    assert result.replica == 6 and result.response_ids[:2] == [5, 5] and result.response_ids[-1] == 6
    assert fleet.serving == [6]
    await pool.elastic.tend()
    while fleet.table.missing:
        await asyncio.sleep(0.01)
    assert fleet.serving == [6] and fleet.table[7].does == "joining"
    assert await publish(fleet) == fleet.serving == [6, 7]


@pytest.mark.parametrize("other", ["drained", "failed too"])
async def test_replicas_that_fail_in_a_publication_are_waited_for_if_no_other_one_serves_training(other: str) -> None:
    async def fresh(index: int, old: Any) -> Any:
        return FakeReplica(index)

    fleet = fleet_of({0: FakeReplica(0), 1: FakeReplica(1)})
    fleet._restart = fresh  # type: ignore[assignment]
    pool = Pool(fleet)
    if other == "drained":
        await pool.elastic.drain(1)
    victim = next(iter(fleet.serving))
    await fleet.begin_sync()
    await pool.elastic.replace_later([0, 1] if other == "failed too" else [victim])
    assert fleet.members == [0, 1] and pool.ended == [] and fleet.table.missing == 0
    fleet.admit_joining()
    assert victim in fleet.serving


async def test_a_replica_that_was_removed_is_not_replaced_after_it_has_failed_in_its_last_publication() -> None:
    replicas = {0: FakeReplica(0), 1: FakeReplica(1), 2: FakeReplica(2)}
    fleet = fleet_of(replicas)
    pool = Pool(fleet)
    await fleet.begin_sync()
    await pool.elastic.remove(1)
    await pool.elastic.replace_later([1, 2])
    assert fleet.members == [0] and fleet.table.missing == 1
    fleet.admit_joining()
    await asyncio.sleep(2 * elastic_pool.LOOK_S)
    assert set(pool.ended) == {replicas[1], replicas[2]} and fleet.serving == [0]
