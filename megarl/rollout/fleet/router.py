"""Chooses the replica of the next requests; until one has room they wait, those of an evaluation behind training's."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field

from megarl.common.errors import RolloutError
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.fleet.back_pressure import BackPressure
from megarl.rollout.fleet.drain import Hold
from megarl.rollout.fleet.routing import Router


@dataclass(eq=False)
class _Place:
    """One that waits for room. `look`: set when it may have got some; only its owner clears it."""

    background: bool
    look: asyncio.Event = field(default_factory=asyncio.Event)


class Dispatcher:
    """A router, limits by back-pressure, and the queue of those that are held back."""

    def __init__(self, replicas: Iterable[int], hold: Hold | None = None) -> None:
        """`hold`: whether all requests are held back that have not begun; None: never."""
        self._hold = hold or Hold(math.inf)
        self._router = Router(replicas)
        self._limits = BackPressure()
        self._queue: list[_Place] = []  # of those that wait for it, in the order in which they came
        self._peak = EngineLoad()

    @property
    def load(self) -> dict[int, int]:
        """The number of outstanding requests per serving replica."""
        return self._router.load

    async def place(
        self,
        context: RequestContext,
        samples: int,
        *,
        begun: bool,
        background: bool,
        timeout_s: float,
    ) -> int | None:
        """Wait for a replica with room for `samples` requests and assign them.

        None if the deadline has come, and if no replica serves (any more). Training comes before requests
        in the `background`; within each, whoever comes first is placed first. Requests that have been `begun` do not
        wait for room, nor for the end of a hold. Raises RolloutError after `timeout_s`, which does not count while they
        are held back, or if the hold lasts too long.
        """
        came, deadline = time.monotonic(), context.deadline
        place = _Place(background)
        self._queue.append(place)
        try:
            while True:
                if not self._router.load:
                    return None
                held = not begun and self._hold.active
                closed = self._router.load if held else self._closed(place, samples, begun)
                if (index := self._assign(context, samples, closed)) is not None:
                    return index
                now, load = time.monotonic(), self._router.load
                if deadline is not None and now >= deadline.at:
                    return None
                until = self._hold.until if held else max(came, self._hold.ended_at) + timeout_s
                if now >= until and held:
                    raise self._hold.too_long(f"{samples} requests")
                if now >= until:
                    raise RolloutError(
                        f"{samples} requests waited {timeout_s:.0f} s for room in a replica; requests in flight: {load}"
                    )
                place.look.clear()
                with contextlib.suppress(TimeoutError):
                    end = until if deadline is None else min(until, deadline.at)
                    async with asyncio.timeout(end - now):
                        await place.look.wait()
        finally:
            self._queue.remove(place)
            self._wake_next()

    def _assign(self, context: RequestContext, samples: int, closed: Container[int]) -> int | None:
        return self._router.assign(context.prefix, samples, context.home, closed, context.near)

    def _closed(self, place: _Place, samples: int, begun: bool) -> Container[int]:
        """Return the replicas that cannot be assigned to a place in the queue."""
        if begun:
            return ()
        load = self._router.load
        return self._limits.full(load, samples) if self._is_next(place) else load

    def _is_next(self, place: _Place) -> bool:
        """Tell whether nobody comes before a place in the queue."""
        return next((each for each in self._queue if not each.background), self._queue[0]) is place

    def _wake_next(self) -> None:
        """Let the first of either kind look again, because a replica may have got room; no other could be placed."""
        for background in (False, True):
            first = next((place for place in self._queue if place.background == background), None)
            if first is not None:
                first.look.set()

    def look_again(self) -> None:
        """Let all that wait look again.

        Call it when replicas came or went, or a hold has begun or ended.
        """
        for place in self._queue:
            place.look.set()

    def reported(self, prefix: Hashable, replica: int, ended: int, load: EngineLoad) -> None:
        """Record a replica's report, in which `ended` responses ended."""
        self._peak |= load
        if replica in self._router.load:
            self._limits.reported(replica, load, self._router.load[replica], ended)
        self.release(prefix, replica, ended)

    def release(self, prefix: Hashable, replica: int, requests: int) -> None:
        """Record that a replica does not work on these requests any more."""
        self._router.release(prefix, replica, requests)
        self._wake_next()

    def take_load(self) -> EngineLoad:
        """Return the peaks of all replicas since the last call, as far as they have reported."""
        peak, self._peak = self._peak, EngineLoad()
        return peak

    def remove(self, replica: int) -> None:
        """Place nothing more on a replica; one that is not there is accepted."""
        self._router.remove(replica)
        self._limits.forget(replica)
        self.look_again()

    def add(self, replica: int) -> None:
        """Add a new or restarted replica, which is idle. Raises ValueError if it is there already."""
        self._router.add(replica)
        self.look_again()
