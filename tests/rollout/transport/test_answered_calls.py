"""Calls that are sent several times run once."""

import asyncio

import pytest

from megarl.rollout.transport.rpc import AnsweredCalls


class Counter:
    """Counts how often it is called; each call ends when `go` is set, with its number."""

    def __init__(self) -> None:
        self.calls, self.go = 0, asyncio.Event()

    async def add(self) -> int:
        self.calls += 1
        number = self.calls
        await self.go.wait()
        return number


async def test_a_call_that_is_sent_again_while_it_runs_or_after_its_end_runs_once() -> None:
    counter, calls = Counter(), AnsweredCalls()
    sent = [asyncio.create_task(calls.answer("a", counter.add)) for _ in range(2)]
    await asyncio.sleep(0)
    sent[0].cancel()  # the connection of the first is cut
    other = asyncio.create_task(calls.answer("b", counter.add))
    await asyncio.sleep(0)
    counter.go.set()
    assert await sent[1] == 1 and await other == 2
    assert await calls.answer("a", counter.add) == 1 and counter.calls == 2


async def test_a_failure_is_an_answer() -> None:
    async def fails() -> None:
        raise ValueError("refused")

    async def never() -> None:
        raise AssertionError("the call runs again")

    calls = AnsweredCalls()
    for run in (fails, never):
        with pytest.raises(ValueError, match="refused"):
            await calls.answer("a", run)


async def test_only_so_many_answers_are_kept_and_no_running_call_is_forgotten() -> None:
    counter, calls = Counter(), AnsweredCalls(kept=3)
    slow = asyncio.create_task(calls.answer("slow", counter.add))
    await asyncio.sleep(0)
    for number in range(50):
        await calls.answer(f"{number}", lambda: asyncio.sleep(0))
        assert len(calls._calls) <= 3 + 2
    again = asyncio.create_task(calls.answer("slow", counter.add))
    counter.go.set()
    assert await slow == await again == 1
