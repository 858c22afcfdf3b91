"""A call in the background: its result or its own exception, when it has ended and not before."""

from __future__ import annotations

import threading

import pytest

from megarl.weights.background_call import BackgroundCall


def test_the_result_is_that_of_the_call_with_its_arguments() -> None:
    call = BackgroundCall(lambda a, b: (a, b, threading.current_thread().daemon), 1, "two")
    assert call.result() == (1, "two", True)
    assert call.result() == (1, "two", True)  # it can be fetched again


def test_the_call_runs_beside_its_caller_who_waits_for_it_in_result() -> None:
    go, began = threading.Event(), threading.Event()

    def wait() -> str:
        began.set()
        assert go.wait(60)
        return "done"

    call = BackgroundCall(wait)
    assert began.wait(60)
    waiting = BackgroundCall(call.result)
    waiting._thread.join(0.1)
    assert waiting._thread.is_alive()
    go.set()
    assert waiting.result() == "done"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_of_any_kind_is_raised_as_itself(error: BaseException) -> None:
    def fail() -> None:
        raise error

    call = BackgroundCall(fail)
    with pytest.raises(type(error)) as raised:
        call.result()
    assert raised.value is error
