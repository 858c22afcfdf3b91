"""Calls of one method on several replicas at the same time, each in a thread; the failure of one cuts the others short.

A replica that waits for other members in its call would otherwise be waited for until the deadline, although one of
these has failed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.weights.group.protocols import ReplicaHandle
from megarl.weights.group.transport import POLL_S

EXTRA_WAIT_S = 3.0  # after the first failure, in which the calls to the other replicas can end


@dataclass(frozen=True)
class Returned:
    """The end of one call to replica number `index`, at `time.monotonic`: its result, or the exception."""

    index: int
    value: object
    error: BaseException | None
    at: float


class CutShort(TimeoutError):  # noqa: N818
    """A call that had not ended soon after the failure of another member: it may have needed longer only."""


class CallsFailed(Exception):  # noqa: N818
    """Calls to some replicas raised. `failures`: the exceptions by index of the replica; `first`: the earliest ones."""

    def __init__(self, method: str, failures: dict[int, BaseException], first: dict[int, BaseException]) -> None:
        super().__init__(method)
        self.method = method
        self.failures = failures
        self.first = first or failures


@dataclass(frozen=True)
class Release:
    """Tells calls that a member has failed elsewhere, and releases the members when a call fails."""

    aborted: Callable[[], bool]
    abort: Callable[[str], None]


def call_all(
    replicas: Sequence[ReplicaHandle],
    method: str,
    arguments: Sequence[tuple[object, ...]] | None = None,
    *,
    timeout_s: float,
    release: Release | None = None,
) -> list[Returned]:
    """Call `method` on all replicas in parallel, and return the results in their order.

    `arguments`: one tuple per replica; None: none. The first failure, or with `release` a failure of any member,
    releases all members from their waits; the calls then have EXTRA_WAIT_S to end.

    Raises:
        CallsFailed: with all failures, and those that came first.
    """
    arguments = arguments or [()] * len(replicas)
    done: queue.Queue[Returned] = queue.Queue()
    for index, replica in enumerate(replicas):
        call = _bound_call(replica, method, arguments[index], timeout_s)
        threading.Thread(target=_run_call, args=(index, call, done), name=f"{method}-{index}", daemon=True).start()
    returned: dict[int, Returned] = {}
    first: dict[int, BaseException] = {}
    deadline = time.monotonic() + timeout_s + EXTRA_WAIT_S
    aborted = False
    while len(returned) < len(replicas) and time.monotonic() < deadline:
        each = _next_returned(done)
        if each is not None:
            returned[each.index] = each
        failures = {index: each.error for index, each in returned.items() if each.error is not None}
        if not aborted and (failures or (release is not None and release.aborted())):
            aborted, first = True, dict(failures)
            deadline = min(deadline, time.monotonic() + EXTRA_WAIT_S)
            if release is not None and failures:
                index, failure = next(iter(failures.items()))
                release.abort(f"engine {replicas[index].name} failed in {method}: {brief(failure)}")
    failures = {index: each.error for index, each in returned.items() if each.error is not None}
    for index in set(range(len(replicas))) - returned.keys():
        failures[index] = (
            CutShort(f"no answer to {method} within {EXTRA_WAIT_S:.1f} s after the failure of another member")
            if aborted
            else TimeoutError(f"no answer to {method} within {timeout_s:.1f} s")
        )
    if failures:
        raise CallsFailed(method, failures, first)
    return [returned[index] for index in range(len(replicas))]


def _bound_call(
    replica: ReplicaHandle, method: str, args: tuple[object, ...], timeout_s: float
) -> Callable[[], object]:
    return lambda: replica.call(method, *args, timeout_s=timeout_s)


def _next_returned(done: queue.Queue[Returned]) -> Returned | None:
    """Return the next call that has returned, or None after POLL_S: then deadline and abort are looked at."""
    try:
        return done.get(timeout=POLL_S)
    except queue.Empty:
        return None


def _run_call(index: int, call: Callable[[], object], done: queue.Queue[Returned]) -> None:
    try:
        value = call()
        done.put(Returned(index, value, None, time.monotonic()))
    except BaseException as error:
        done.put(Returned(index, None, error, time.monotonic()))


def brief(error: BaseException) -> str:
    """Return the type and the last line of an error: a remote error has its traceback before that line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:500] if lines else ''}"
