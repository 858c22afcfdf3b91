"""Requests of one turn of the event loop travel together, and fail or are cancelled together."""

import asyncio
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.agents.batch_stats import BusyClock
from megarl.rollout.engine.continuation import GroupDeadline, RequestContext
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.fleet.engine_pool import RequestCoalescer

SPEC = SamplingSpec(4, 1.0, (2,))


class FakePool:
    def __init__(self, *, fail: Exception | None = None, delay_s: float = 0.0) -> None:
        self.fail, self.delay_s = fail, delay_s
        self.calls: list[tuple[Hashable, list[str], int | None]] = []
        self.deadlines: list[Any] = []
        self.tokens: list[Any] = []

    async def generate(
        self, context: RequestContext, requests: Sequence[GenerateRequest], *, background: bool
    ) -> list[Any]:
        self.deadlines.append(context.deadline)
        self.tokens.append(context.tokens)
        self.calls.append((context.prefix, [request.request_id for request in requests], context.home))
        await asyncio.sleep(self.delay_s)
        if self.fail is not None:
            raise self.fail
        return [SimpleNamespace(request_id=request.request_id, seconds=0.5) for request in requests]


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, [1], SPEC)


async def ask(batcher: RequestCoalescer, *wanted: tuple[str, Hashable]) -> list[str]:
    answers = await asyncio.gather(
        *(batcher.generate(request(name), RequestContext(prefix)) for name, prefix in wanted)
    )
    return [answer.request_id for answer in answers]


async def test_one_call_for_each_prefix_and_answers_to_their_askers() -> None:
    pool = FakePool()
    assert await ask(RequestCoalescer(pool), ("a0", 7), ("b0", 8), ("a1", 7)) == ["a0", "b0", "a1"]  # type: ignore[arg-type]
    assert pool.calls == [(7, ["a0", "a1"], None), (8, ["b0"], None)]


async def test_the_deadline_and_the_tokens_of_a_group_go_with_its_call() -> None:
    pool, deadline = FakePool(), GroupDeadline(at=5.0, seconds=2.0, policy="cut")
    tokens = {"a": ResponsePart([7], [-0.5])}
    batcher = RequestCoalescer(pool)  # type: ignore[arg-type]
    await asyncio.gather(
        batcher.generate(request("a"), RequestContext(1, deadline=deadline, tokens=tokens)),
        batcher.generate(request("b"), RequestContext(2)),
    )
    assert pool.deadlines == [deadline, None]
    assert pool.tokens[0] is tokens and pool.tokens[1] is None


async def test_chunks_without_a_prefix_go_in_turn() -> None:
    pool = FakePool()
    await ask(RequestCoalescer(pool, chunk=2, in_turn=True), *((name, None) for name in "abcde"))  # type: ignore[arg-type]
    assert pool.calls == [("a", ["a", "b"], 0), ("c", ["c", "d"], 1), ("e", ["e"], 2)]


async def test_whoever_shared_a_call_shares_its_failure_and_the_clock_is_told() -> None:
    clock, now = BusyClock(), iter([0.0, 2.0])
    batcher = RequestCoalescer(FakePool(fail=ValueError("lost")), clock=clock, now=lambda: next(now))  # type: ignore[arg-type]
    answers = await asyncio.gather(
        *(batcher.generate(request(n), RequestContext(1)) for n in "ab"), return_exceptions=True
    )
    assert [str(answer) for answer in answers] == ["lost", "lost"]
    assert clock.take(3.0) == 0.0  # nothing is under way any more, and an engine heard of no second


async def test_cancel_ends_calls_and_whoever_waits_for_them() -> None:
    batcher = RequestCoalescer(FakePool(delay_s=60))  # type: ignore[arg-type]
    waiting = asyncio.create_task(batcher.generate(request("a"), RequestContext()))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(batcher.cancel(), 1)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_cancel_ends_requests_that_have_not_been_sent_yet() -> None:
    pool = FakePool()
    batcher = RequestCoalescer(pool)  # type: ignore[arg-type]
    waiting = asyncio.create_task(batcher.generate(request("a"), RequestContext()))
    await asyncio.sleep(0)  # it has put its request down; the event loop has not sent it
    await batcher.cancel()
    await asyncio.sleep(0.01)
    assert pool.calls == [] and waiting.cancelled()
