"""Tasks that nobody awaits: the first failure ends the run, until everything is dropped."""

import asyncio
import contextlib

import pytest

from megarl.common.errors import NoReplicaLeft, RolloutError
from megarl.rollout.transport import background
from megarl.rollout.transport.background import BackgroundTasks


async def fail(error: Exception) -> None:
    raise error


async def test_a_task_that_ends_wakes_whoever_waits_for_a_change() -> None:
    done = []

    async def work() -> None:
        done.append(1)

    tasks = BackgroundTasks()
    tasks.start(work())
    await tasks.changed.wait()
    assert done == [1]
    tasks.check()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a mistake"), "rollout failed: a mistake"),
        (TimeoutError("late"), "rollout failed: late"),
        (KeyError("x"), "rollout failed: KeyError: 'x'"),
    ],
)
async def test_a_failure_is_raised_as_a_rollout_error_by_every_check(error: Exception, message: str) -> None:
    tasks = BackgroundTasks()
    tasks.start(fail(error))
    await tasks.changed.wait()
    for _ in range(2):
        with pytest.raises(RolloutError) as raised:
            tasks.check()
        assert str(raised.value) == message


async def test_a_rollout_error_keeps_its_type_and_the_first_failure_stays() -> None:
    first = NoReplicaLeft(0, "replica 0 died")
    tasks = BackgroundTasks()
    tasks.start(fail(first))
    await tasks.changed.wait()
    tasks.changed.clear()
    tasks.start(fail(ValueError("a consequence")))
    await tasks.changed.wait()
    with pytest.raises(NoReplicaLeft) as raised:
        tasks.check()
    assert raised.value is first


async def test_drop_waits_until_all_tasks_have_ended_and_forgets_the_failure() -> None:
    ended = []

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)  # as a put that is in progress
            ended.append(1)

    tasks = BackgroundTasks()
    for _ in range(3):
        tasks.start(slow_to_end())
    tasks.start(fail(ValueError("a mistake")))
    await tasks.changed.wait()
    await tasks.drop()
    assert ended == [1, 1, 1]
    tasks.check()


async def test_a_task_that_ignores_its_cancellation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CANCEL_S", 0.05)
    tasks = BackgroundTasks()
    go = asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()

    tasks.start(stubborn())
    await asyncio.sleep(0)
    with pytest.raises(RolloutError, match="1 tasks of the rollout controller had not ended 0 s after"):
        await tasks.drop()
    go.set()
    await tasks.drop()


async def test_a_task_that_fails_while_it_is_dropped_is_forgotten_too() -> None:
    """Its failure would otherwise be raised to the trainer that begins next."""

    failed = []

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            failed.append(1)
            raise ValueError("in the middle of a put") from None

    tasks = BackgroundTasks()
    tasks.start(fails_when_cancelled())
    await asyncio.sleep(0)
    await tasks.drop()
    await asyncio.sleep(0)
    tasks.check()
    assert failed == [1]


async def test_a_cancelled_task_is_no_failure() -> None:
    ended = []

    async def wait_forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    tasks = BackgroundTasks()
    tasks.start(wait_forever())
    await asyncio.sleep(0)
    tasks.cancel()
    await tasks.changed.wait()
    tasks.check()
    assert ended == [1]
