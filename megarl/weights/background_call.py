"""A call in a thread, whose result or exception is fetched later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A call in a daemon thread. The call must have a deadline of its own."""

    def __init__(self, function: Callable[..., T], *args: object) -> None:
        self._value: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., T], args: tuple[object, ...]) -> None:
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Wait until the call has ended. Return its result or raise its exception."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
