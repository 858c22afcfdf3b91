"""The time at which groups are put, with a stand-in for the queue: together if more are to follow, else at once."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from megarl.queue import transfer
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.queue.transfer import QueueWriter
from tests.support.measures import own_time


@pytest.fixture(autouse=True)
def loops_in_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    own_time.install(monkeypatch)


class Writer(QueueWriter):
    """Notes the keys of each put."""

    def __init__(self) -> None:
        self.puts: list[list[str]] = []
        self.timeout_s = 60.0

    async def submit(self, coroutine: Coroutine[Any, Any, Any], what: str) -> Any:
        return await coroutine

    async def put(self, keys: list[str], fields: Any, tags: Any) -> None:
        self.puts.append(keys)

    async def tags(self) -> dict[str, Any]:
        return {}


def group(number: int) -> list[Trajectory]:
    return [Trajectory(number, 0, [1], [2], [-0.5], (VersionSpan(0, 0, 1),), "stop", 1.0)]


@pytest.fixture
def writer() -> Writer:
    return Writer()


async def test_groups_that_finish_soon_after_a_put_share_the_next_one(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PUT_INTERVAL_S", 0.2)
    began = time.monotonic()
    await writer.put_group(group(0), more=True)  # nothing was put before
    await asyncio.gather(*(writer.put_group(group(number), more=True) for number in (1, 2)))
    assert (time.monotonic() - began) >= 0.2
    assert writer.puts == [["0:0"], ["1:0", "2:0"]]


async def test_the_last_group_is_put_at_once_with_those_that_wait(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PUT_INTERVAL_S", 60.0)
    await writer.put_group(group(0), more=True)
    waiting = asyncio.create_task(writer.put_group(group(1), more=True))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await asyncio.gather(waiting, writer.put_group(group(2)))
        await writer.put_group(group(3))
    assert writer.puts == [["0:0"], ["1:0", "2:0"], ["3:0"]]


async def test_groups_that_are_cleared_while_they_wait_are_not_put(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PUT_INTERVAL_S", 0.1)
    await writer.put_group(group(0), more=True)
    waiting = asyncio.create_task(writer.put_group(group(1), more=True))
    await asyncio.sleep(0)
    waiting.cancel()
    await writer.clear_all()
    await writer.put_group(group(2))
    assert writer.puts == [["0:0"], ["2:0"]]


async def test_a_caller_whose_rows_are_cleared_does_not_wait_on(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PUT_INTERVAL_S", 0.1)
    await writer.put_group(group(0), more=True)
    waiting = asyncio.create_task(writer.put_group(group(1), more=True))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await writer.clear_all()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert writer.puts == [["0:0"]]


async def test_a_cancelled_clear_leaves_the_put_that_is_in_progress(writer: Writer) -> None:
    go_on = asyncio.Event()

    async def slow(keys: list[str], fields: Any, tags: Any) -> None:
        await go_on.wait()
        writer.puts.append(keys)

    writer.put = slow  # type: ignore[method-assign]
    writing = asyncio.create_task(writer.put_group(group(0)))
    await asyncio.sleep(0.01)
    clearing = asyncio.create_task(writer.clear_all())
    await asyncio.sleep(0.01)
    clearing.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    async with asyncio.timeout(10):
        await writing
    assert writer.puts == [["0:0"]]
