"""Calls in threads return their results and raise their errors."""

import threading

import pytest

from megarl.common.process.threads import call_in_thread


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
