"""Results of threads: as themselves, and in the event loop in order, with their errors, and with few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from megarl.common.process.threads import ThreadResults, call_in_thread


def test_a_call_runs_in_a_daemon_thread_and_its_caller_waits_for_the_result() -> None:
    go = threading.Event()

    def wait(number: int) -> tuple[int, str, bool]:
        assert go.wait(60)
        return number, threading.current_thread().name, threading.current_thread().daemon

    call = call_in_thread(wait, 1, name="one")
    with pytest.raises(TimeoutError):
        call.result(0)
    assert not call.cancel()
    go.set()
    assert call.result(60) == (1, "one", True)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_of_any_kind_is_raised_as_itself(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        call_in_thread(fail).result(60)
    assert raised.value is error


def test_results_and_errors_arrive_and_those_that_end_together_share_a_wake_up() -> None:
    async def run() -> tuple[list[Any], int]:
        loop, results, wake_ups = asyncio.get_running_loop(), ThreadResults(), 0
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal wake_ups
            wake_ups += 1
            return wake(*args, **kwargs)

        def end_all() -> None:
            for number, future in enumerate(futures):
                future.set_exception(ValueError("odd")) if number % 2 else future.set_result(number)

        futures: list[Future[int]] = [Future() for _ in range(6)]
        waiting = [asyncio.create_task(results.of(future)) for future in futures]
        await asyncio.sleep(0)
        setattr(loop, "call_soon_threadsafe", counted)
        end_all()  # the loop cannot look meanwhile
        found = await asyncio.gather(*waiting, return_exceptions=True)
        return found, wake_ups

    found, wake_ups = asyncio.run(run())
    assert [each if isinstance(each, int) else str(each) for each in found] == [0, "odd", 2, "odd", 4, "odd"]
    assert wake_ups == 1


def test_results_of_another_thread_arrive_whenever_they_end() -> None:
    async def run() -> list[int]:
        results, futures = ThreadResults(), [Future[int]() for _ in range(500)]

        def end() -> None:
            for number, future in enumerate(futures):
                future.set_result(number)

        ending = asyncio.get_running_loop().run_in_executor(None, end)
        async with asyncio.timeout(10):
            found = list(await asyncio.gather(*map(results.of, futures)))
        await ending
        return found

    assert asyncio.run(run()) == list(range(500))


def test_one_that_has_ended_already_is_returned() -> None:
    future: Future[str] = Future()
    future.set_result("known")
    assert asyncio.run(ThreadResults().of(future)) == "known"


def test_a_cancelled_caller_cancels_the_future_and_the_other_way_round() -> None:
    async def run() -> None:
        results, asked, given_up = ThreadResults(), Future[int](), Future[int]()
        caller, other = (asyncio.create_task(results.of(future)) for future in (asked, given_up))
        await asyncio.sleep(0)
        caller.cancel()
        given_up.cancel()
        for each in (caller, other):
            with pytest.raises(asyncio.CancelledError):
                await each
        assert asked.cancelled()

    asyncio.run(run())
