"""The drain before a publication without partial rollouts: running responses end first, and nothing begins meanwhile.

A call of the fleet is running from the time when a replica works on it, or from its first reported token if no replica
does because one was lost. Calls that are not running are held back until the publication is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megarl.common.errors import RolloutError
from megarl.rollout.engine.continuation import ResponsesSoFar


class PublicationHold:
    """Tells whether what has not begun is held back, and since when; `end` lets it go."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the longest time that it may last; whoever waits longer fails."""
        self.limit_s = limit_s
        self.ended_at = -math.inf
        self._began_at: float | None = None
        self._open = asyncio.Event()
        self._open.set()

    @property
    def active(self) -> bool:
        """True if anything is held back."""
        return self._began_at is not None

    @property
    def until(self) -> float:
        """The time (`time.monotonic`) at which the hold has lasted too long."""
        return math.inf if self._began_at is None else self._began_at + self.limit_s

    def begin(self) -> None:
        """Hold back what has not begun. A hold that is active goes on."""
        if self._began_at is None:
            self._began_at = time.monotonic()
            self._open.clear()

    def end(self) -> None:
        """Let go what was held back; nothing happens if no hold is active."""
        if self._began_at is not None:
            self._began_at, self.ended_at = None, time.monotonic()
            self._open.set()

    async def wait(self, what: str) -> None:
        """Wait for the end of the hold. Raises RolloutError naming `what` if it lasts too long."""
        with contextlib.suppress(TimeoutError):
            while self.active:
                async with asyncio.timeout(self.until - time.monotonic()):
                    await self._open.wait()
        if self.active:
            raise self.too_long(what)

    def too_long(self, what: str) -> RolloutError:
        """Return the error of `what` that was held back too long."""
        return RolloutError(
            f"{what} waited {self.limit_s:.0f} s for a publication to end that lets running responses end first "
            "(rollout.partial_rollout: false)"
        )


@dataclass(eq=False)
class Call:
    """A call of the fleet: its responses so far, and the replica that works on them, if one does.

    `background`: it belongs to an evaluation beside training. `foreign`: to somebody outside the run; its responses may
    have several versions, and may take longer than any bound of the run.
    """

    responses: ResponsesSoFar
    background: bool
    foreign: bool = False
    replica: int | None = None

    @property
    def running(self) -> bool:
        """True if it has begun and not ended, so that other weights now would give its responses two versions."""
        return bool(self.responses.unfinished) and (self.replica is not None or self.responses.tokens > 0)

    @contextlib.contextmanager
    def served_by(self, replica: int) -> Iterator[None]:
        """Note that a replica works on it during the block."""
        self.replica = replica
        try:
            yield
        finally:
            self.replica = None


class RunningCalls:
    """All calls of the fleet, and the wait for the end of those that are running."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def of(self, responses: ResponsesSoFar, *, background: bool, foreign: bool = False) -> Iterator[Call]:
        """Make the call to which `responses` belong, and forget it at the end of the block."""
        call = Call(responses, background, foreign)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            self.changed()

    def changed(self) -> None:
        """Let `end` look again, because a call that a replica has left may not be running any more."""
        self._changed.set()

    def on(self, replica: int) -> int:
        """Return the number of unfinished responses on which a replica works."""
        return sum(len(call.responses.unfinished) for call in self._calls if call.replica == replica)

    async def end(self, timeout_s: float, among: Callable[[Call], bool]) -> None:
        """Wait until no call of those that `among` accepts is running.

        Raises RolloutError naming the replicas and their numbers of requests after `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        while running := [call for call in self._calls if call.running and among(call)]:
            self._changed.clear()
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise _not_ended(running, timeout_s) from None


def _not_ended(running: list[Call], timeout_s: float) -> RolloutError:
    left: Counter[str] = Counter()
    for call in running:
        left["no replica" if call.replica is None else f"replica {call.replica}"] += len(call.responses.unfinished)
    return RolloutError(
        f"a publication waited {timeout_s:.0f} s (timeouts.generate_s) for {left.total()} running requests to end "
        f"(rollout.partial_rollout: false): {_by_name(left)}"
    )


def _by_name(left: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in sorted(left.items()))
