"""Runs an agent loop so that a child which it forks ends instead of running the other loops of its parent.

A child that comes back from a loop, or waits in it, would go on with the event loop of its parent: with copies of all
loops, and with descriptors that are the parent's own. So whenever the loop gives control back, the process is compared
with the one in which it was started. A child of `multiprocessing` or `subprocess` never comes back and is not
concerned; nor is one that a thread of the loop forks, which ends with the run.
"""

from __future__ import annotations

import os
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def unforked(loop: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Return what a loop returns. Raises what it raises."""
    return _driven(loop, os.getpid())


@types.coroutine
def _driven(loop: Coroutine[Any, Any, T], own_pid: int) -> Generator[Any, Any, T]:
    sent: Any = None
    raised: BaseException | None = None
    while True:
        try:
            waited_for = loop.send(sent) if raised is None else loop.throw(raised)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            if os.getpid() != own_pid:
                os.write(2, b"a child that an agent loop had forked came back from the loop: it was ended\n")
                os._exit(0)
        sent = raised = None
        try:
            sent = yield waited_for
        except BaseException as error:  # that of what was waited for, or a cancellation: the loop's to handle
            raised = error
