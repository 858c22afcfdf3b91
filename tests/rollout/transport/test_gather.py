"""Messages gather until the time is over or one call can take no more of them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from megarl.rollout.transport import gather
from megarl.rollout.transport.gather import Outbox, gathering_s
from megarl.rollout.transport.link import LinkServer


@dataclass(frozen=True)
class Message:
    """One of a size."""

    number: int
    size: int = 1


def test_the_time_to_gather_grows_with_those_who_wait_and_is_bounded() -> None:
    assert gathering_s(0) == 0 < gathering_s(100) < gathering_s(1000)
    assert gathering_s(100_000) == gather.MOST_GATHER_S


@pytest.mark.parametrize("size", [1, gather.MOST_SIZE])
async def test_messages_gather_until_a_call_is_full(size: int) -> None:
    """A call is full by the number of messages or by their size: nobody waits for the end of the time to gather."""
    box: Outbox[Message] = Outbox(gather_s=60.0)
    box.put(Message(0))
    assert await box.take(1.0) == [Message(0)]
    taking = asyncio.ensure_future(box.take(1.0))
    box.put(Message(1))
    await asyncio.sleep(0.02)
    assert not taking.done()
    messages = [Message(number, size) for number in range(2, 2 + gather.MOST_MESSAGES)]
    for message in messages:
        box.put(message)
    first = await asyncio.wait_for(taking, 10)
    assert first == [Message(1), *messages][: len(first)] and 1 < len(first) <= gather.MOST_MESSAGES


async def test_what_is_left_over_is_no_full_call() -> None:
    box: Outbox[Message] = Outbox(gather_s=0.1)
    for number in range(gather.MOST_MESSAGES + 1):
        box.put(Message(number))
    began = time.monotonic()
    assert len(await box.take(1.0)) == gather.MOST_MESSAGES
    assert await box.take(1.0) == [Message(gather.MOST_MESSAGES)]
    box.put(Message(-1))
    box.clear()
    assert await box.take(0.01) == []
    assert (time.monotonic() - began) >= 0.1


async def test_what_was_lost_on_its_way_is_given_again_and_nothing_twice() -> None:
    async def receive(messages: Sequence[object]) -> None: ...

    server: LinkServer[Message] = LinkServer(receive, int, 0.0)
    server.outbox.put(Message(1))
    first, *again = await asyncio.gather(*(server.take(0, 1.0) for _ in range(3)))
    assert first[:2] == (1, (Message(1),)) and again == [first] * 2
    waiting = asyncio.ensure_future(server.take(1, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    server.outbox.put(Message(2))
    assert await server.take(0, 1.0) == first and (await server.take(1, 1.0))[1] == (Message(2),)
