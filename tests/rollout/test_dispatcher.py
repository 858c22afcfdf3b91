"""The next place goes to training before an evaluation, which a pinned replica serves alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from megarl.common.errors import RolloutError
from megarl.rollout.dispatcher import Dispatcher
from megarl.rollout.engine_load import EngineLoad

FULL = EngineLoad(kv_usage=1.0, running=1, waiting=1)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def place(
    dispatcher: Dispatcher, name: str, *, background: bool = False, begun: bool = False, timeout_s: float = 5.0
) -> asyncio.Task[int | None]:
    return asyncio.ensure_future(
        dispatcher.place(name, 1, None, begun=begun, background=background, deadline=None, timeout_s=timeout_s)
    )


async def busy(dispatcher: Dispatcher, replica: int) -> None:
    """Give a replica one request, and let it report that it has no room for another."""
    dispatcher._router.assign(f"first of {replica}", 1, replica)
    dispatcher.reported(f"first of {replica}", replica, 0, FULL)


def test_training_is_placed_before_an_evaluation_that_came_first() -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([0], back_pressure=True)
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
            dispatcher.finish(done, 0, 1)
            await asyncio.sleep(0.01)
        assert order == ["early", "late", "evaluation"]

    run(scenario)


@pytest.mark.parametrize("back_pressure", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_pinned_replica_works_for_the_evaluation_alone(back_pressure: bool, begun: bool) -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([0, 1], back_pressure)
        assert dispatcher.pins.pin([0, 1], 1) == {1}
        trained = [await place(dispatcher, f"group {i}", begun=begun) for i in range(3)]
        evaluated = [await place(dispatcher, f"problem {i}", background=True, begun=begun) for i in range(5)]
        assert trained == [0] * 3 and evaluated == [1] * 5

    run(scenario)


def test_training_that_waits_does_not_hold_back_a_pinned_replica() -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([0, 1], back_pressure=True)
        dispatcher.pins.pin([0, 1], 1)
        await busy(dispatcher, 0)
        held = place(dispatcher, "held back")
        await asyncio.sleep(0.01)
        assert await place(dispatcher, "evaluation", background=True) == 1 and not held.done()
        dispatcher.pins.release()  # it has missed no version
        dispatcher.pins_changed()
        assert await held == 1

    run(scenario)


def test_without_a_replica_for_training_it_waits_and_its_time_is_bounded() -> None:
    """This is so while the only other replica is being replaced."""

    async def scenario() -> None:
        dispatcher = Dispatcher([0, 1], back_pressure=False)
        dispatcher.pins.pin([0, 1], 1)
        dispatcher.remove(0)
        with pytest.raises(RolloutError, match="waited 0 s for room"):
            await place(dispatcher, "late", begun=True, timeout_s=0.05)
        waiting = place(dispatcher, "waits", begun=True)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        dispatcher.add(0)
        assert await waiting == 0

    run(scenario)


def test_an_evaluation_whose_pinned_replica_is_lost_goes_on_with_the_others() -> None:
    async def scenario() -> None:
        dispatcher = Dispatcher([0, 1], back_pressure=True)
        dispatcher.pins.pin([0, 1], 1)
        dispatcher.remove(1)
        assert await place(dispatcher, "evaluation", background=True) == 0

    run(scenario)
