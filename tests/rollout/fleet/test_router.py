"""The next place goes to training before an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.fleet.router import Dispatcher

FULL = EngineLoad(kv_usage=1.0, running=1, waiting=1)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def place(
    dispatcher: Dispatcher, name: str, *, background: bool = False, begun: bool = False, timeout_s: float = 5.0
) -> asyncio.Task[int | None]:
    return asyncio.ensure_future(
        dispatcher.place(RequestContext(name), 1, begun=begun, background=background, timeout_s=timeout_s)
    )


async def busy(dispatcher: Dispatcher, replica: int) -> None:
    """Give a replica one request, and let it report that it has no room for another."""
    dispatcher._router.assign(f"first of {replica}", 1, replica)
    dispatcher.reported(f"first of {replica}", replica, 0, FULL)


def test_training_is_placed_before_an_evaluation_that_came_first() -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([0])
        await busy(dispatcher, 0)
        order: list[str] = []
        evaluation, early, late = (
            place(dispatcher, "evaluation", background=True), place(dispatcher, "early"), place(dispatcher, "late")
        )  # fmt: skip
        for name, task in (("evaluation", evaluation), ("early", early), ("late", late)):
            task.add_done_callback(lambda _, name=name: order.append(name))
        await asyncio.sleep(0.01)
        assert order == []
        for done in ("first of 0", "early", "late"):
            dispatcher.release(done, 0, 1)
            await asyncio.sleep(0.01)
        assert order == ["early", "late", "evaluation"]

    run(scenario)


def test_room_that_comes_while_another_one_queues_up_is_used_at_once() -> None:
    """In one turn of the event loop the first one looks, the replica becomes idle, and another one looks."""

    async def scenario() -> None:
        dispatcher = Dispatcher([0])
        await busy(dispatcher, 0)
        first = place(dispatcher, "first")
        asyncio.get_running_loop().call_soon(dispatcher.release, "first of 0", 0, 1)
        second = place(dispatcher, "second")
        assert await asyncio.wait_for(first, 1) == 0
        dispatcher.release("first", 0, 1)
        assert await asyncio.wait_for(second, 1) == 0

    run(scenario)


@pytest.mark.parametrize("turns", range(4))
def test_whoever_is_cancelled_while_room_comes_does_not_take_it(turns: int) -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([0])
        await busy(dispatcher, 0)
        waiting = [place(dispatcher, f"{number}") for number in range(3)]
        await asyncio.sleep(0.01)
        dispatcher.reported("first of 0", 0, 0, FULL)
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=1)
        assert all(task.cancelled() for task in waiting)
        dispatcher.release("first of 0", 0, 1)
        assert await place(dispatcher, "next") == 0

    run(scenario)


def test_a_report_wakes_only_those_that_are_next() -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([0])
        await busy(dispatcher, 0)
        asked: list[int] = []
        check = dispatcher._closed

        def counted(waiting: Any, samples: int, begun: bool) -> Any:
            asked.append(1)
            return check(waiting, samples, begun)

        tasks = [place(dispatcher, f"{number}", background=number % 2 == 1) for number in range(20)]
        await asyncio.sleep(0.01)
        dispatcher._closed = counted  # type: ignore[method-assign]
        dispatcher.reported("first of 0", 0, 0, FULL)
        await asyncio.sleep(0.01)
        assert len(asked) == 2  # one of training, one of the evaluation
        for task in tasks:
            task.cancel()

    run(scenario)


def test_whoever_has_no_replica_left_is_told_so_and_does_not_wait_for_room() -> None:
    """The fleet knows whether another one is coming."""

    async def scenario() -> None:
        dispatcher = Dispatcher([0])
        await busy(dispatcher, 0)
        waiting = place(dispatcher, "waits for room")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        dispatcher.remove(0)
        assert await waiting is None
        assert await place(dispatcher, "training", begun=True) is None
        assert await place(dispatcher, "evaluation", background=True) is None
        dispatcher.add(0)
        assert await place(dispatcher, "training", begun=True) == 0

    run(scenario)
