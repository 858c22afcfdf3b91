"""Calls that share Ray calls: their order, their answers, and what a lost Ray call costs."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from megarl.common.errors import ReplicaFailed, RequestFailed, RolloutError
from megarl.rollout.transport import gather
from megarl.rollout.transport import link as transport
from megarl.rollout.transport.link import LinkLost, Parcel
from megarl.rollout.transport.rpc import Call, Reply, RpcClient, RpcServer
from tests.support.engines.fake_replicas import Method


class ActorDiedError(Exception):
    """Has the name of Ray's exception."""


class ActorUnavailableError(Exception):
    """Has the name of Ray's exception."""


class Actor:
    """An actor that is called by a link. `ray_calls`: their names. `lost`: how many are lost on their way back."""

    def __init__(self) -> None:
        self.ray_calls: list[str] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.lost = 0
        self.slow_s = 0.0  # that a Ray call with calls takes until it runs, as one with large arguments does
        self.dead = False
        self.link = RpcServer(self._call, gather_s=0.0).link
        self.give, self.take = Method(self._give), Method(self._take)

    async def _give(self, number: int, calls: Sequence[Call], link: str) -> None:
        self._check()
        await asyncio.sleep(self.slow_s)
        self.ray_calls.append("give")
        await self.link.give(number, calls, link)
        self._lose()

    async def _take(self, seen: int, wait_s: float, link: str) -> Parcel[Reply]:
        self._check()
        self.ray_calls.append("take")
        answers = await self.link.take(seen, wait_s, link)
        self._check()
        self._lose()
        return answers

    def _check(self) -> None:
        if self.dead:
            raise ActorDiedError("the actor has died")

    def _lose(self) -> None:
        if self.lost:
            self.lost -= 1
            raise ActorUnavailableError("the network is cut")

    def _call(self, method: str, args: Sequence[Any]) -> Awaitable[Any]:
        self.calls.append((method, tuple(args)))
        return getattr(self, f"_do_{method}")(*args)

    async def _do_double(self, number: int) -> int:
        if number in self.gates:
            await self.gates[number].wait()
        return 2 * number

    async def _do_refuse(self, error: Exception) -> None:
        raise error


async def test_calls_of_one_turn_share_a_ray_call_in_their_order_and_their_answers_another_one() -> None:
    actor = Actor()
    link = RpcClient("replica 1", actor, 5.0)
    assert await asyncio.gather(*(link.call("double", each) for each in range(50))) == [2 * n for n in range(50)]
    assert actor.calls == [("double", (each,)) for each in range(50)]
    assert actor.ray_calls.count("give") == 1 and actor.ray_calls.count("take") <= 2


async def test_where_thousands_of_calls_are_open_those_of_many_turns_share_a_ray_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "gathering_s", lambda opened: 0.1 * opened)
    actor = Actor()
    link = RpcClient("replica 1", actor, 5.0)
    assert await link.call("double", 0) == 0  # nothing was sent before
    calls = []
    for number in range(1, 4):
        calls.append(asyncio.ensure_future(link.call("double", number)))
        await asyncio.sleep(0.01)
    assert await asyncio.gather(*calls) == [2, 4, 6]
    assert actor.calls == [("double", (number,)) for number in range(4)]
    assert actor.ray_calls.count("give") == 2


async def test_no_ray_call_overtakes_calls_that_were_sent_before() -> None:
    """Neither the one that takes answers, nor a small one with later calls."""
    actor = Actor()
    actor.slow_s = 0.05
    link = RpcClient("replica 1", actor, 5.0)
    first = asyncio.ensure_future(link.call("double", 1))
    await asyncio.sleep(0.01)
    actor.slow_s = 0.0
    assert await link.call("double", 2) == 4 and await first == 2
    assert actor.calls == [("double", (1,)), ("double", (2,))]
    assert actor.ray_calls[0] == "give"


async def test_an_answer_waits_for_no_other_one() -> None:
    actor = Actor()
    actor.gates[1] = asyncio.Event()
    link = RpcClient("replica 1", actor, 5.0)
    slow = asyncio.ensure_future(link.call("double", 1))
    assert await link.call("double", 2) == 4
    assert await link.call("double", 3) == 6
    assert not slow.done()
    actor.gates[1].set()
    assert await slow == 2


async def test_errors_are_those_of_the_replica_or_texts_that_every_process_can_read() -> None:
    class Strange(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be sent")

    link = RpcClient("replica 1", Actor(), 5.0)
    for error in (RequestFailed("no"), ReplicaFailed(3, "gone")):
        with pytest.raises(type(error)) as found:
            await link.call("refuse", error)
        assert found.value is error
    with pytest.raises(RuntimeError, match="Strange: odd"):
        await link.call("refuse", Strange("odd"))
    assert await link.call("double", 1) == 2


async def test_ray_calls_that_were_lost_on_their_way_are_made_again_and_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "RETRY_S", 0.01)
    actor = Actor()
    actor.lost = 4
    link = RpcClient("replica 1", actor, 5.0)
    assert await asyncio.gather(link.call("double", 1), link.call("double", 2)) == [2, 4]
    assert len(actor.calls) == 2, "a call is made once"


async def test_an_actor_that_cannot_be_reached_for_too_long_is_lost_and_may_be_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "RETRY_S", 0.01)
    actor = Actor()
    actor.lost = 10**6
    link = RpcClient("replica 1", actor, 0.05)
    with pytest.raises(LinkLost, match="the controller waited 0 s for replica 1 to give"):
        await link.call("double", 1)
    actor.lost = 0
    assert await link.call("double", 2) == 4


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_dead_actor_fails_every_call_at_once(when: str) -> None:
    actor = Actor()
    actor.gates[1] = asyncio.Event()
    link = RpcClient("replica 1", actor, 60.0)
    actor.dead = when == "before"
    waiting = [asyncio.ensure_future(link.call("double", 1)) for _ in range(3)]
    await asyncio.sleep(0.01)
    actor.dead = True
    actor.gates[1].set()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [LinkLost] * 3
    with pytest.raises(LinkLost, match="replica 1 has failed: ActorDiedError"):
        await link.call("double", 2)


async def test_what_was_called_before_a_cancelled_call_is_sent_before_what_follows() -> None:
    actor = Actor()
    link = RpcClient("replica 1", actor, 5.0)
    first = asyncio.ensure_future(link.call("double", 1))
    await asyncio.sleep(0)  # it has been made, and its turn is not over
    first.cancel()
    assert await link.call("double", 2) == 4
    assert actor.calls == [("double", (1,)), ("double", (2,))]


async def test_the_link_of_a_new_controller_takes_no_answer_of_the_one_before() -> None:
    actor = Actor()
    actor.gates[1] = asyncio.Event()
    old, new = RpcClient("replica 1", actor, 5.0), RpcClient("replica 1", actor, 5.0)
    waiting = asyncio.ensure_future(old.call("double", 1))
    await asyncio.sleep(0.01)
    assert await new.call("double", 5) == 10
    actor.gates[1].set()
    assert await new.call("double", 6) == 12
    with pytest.raises(RolloutError, match="another controller"):
        await waiting


async def test_a_link_without_calls_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "POLL_S", 0.02)
    actor = Actor()
    link = RpcClient("replica 1", actor, 5.0)
    await link.call("double", 1)
    await asyncio.sleep(0.1)
    taken = len(actor.ray_calls)
    await asyncio.sleep(0.1)
    assert len(actor.ray_calls) == taken
    assert await link.call("double", 2) == 4
