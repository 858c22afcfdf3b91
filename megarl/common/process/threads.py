"""Calls in threads, and their results."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_thread(function: Callable[..., T], *args: object, name: str | None = None) -> Future[T]:
    """Call `function` in a thread called `name`. The future, which cannot be cancelled, has its result or exception.

    It is a daemon thread, unlike those of an executor: a process that ends does not wait for a call that hangs. The
    call must have a deadline of its own, or whoever waits for the future one.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
