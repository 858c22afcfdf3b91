"""Which replica gets the next requests, and who waits until one has room."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Hashable, Iterable

from megarl.common.errors import RolloutError
from megarl.rollout.back_pressure import BackPressure
from megarl.rollout.engine_load import EngineLoad
from megarl.rollout.group_deadline import GroupDeadline
from megarl.rollout.routing import Router


class Dispatcher:
    """A router, limits by back-pressure, and the queue of those that are held back."""

    def __init__(self, replicas: Iterable[int], back_pressure: bool) -> None:
        """`back_pressure`: whether requests are held back from replicas whose KV cache is full."""
        self._router = Router(replicas)
        self._limits = BackPressure() if back_pressure else None
        self._room = asyncio.Event()  # set whenever a replica may have got room
        self._queue: list[object] = []  # of those that wait for it
        self._peak = EngineLoad()

    @property
    def load(self) -> dict[int, int]:
        """The number of outstanding requests per serving replica."""
        return self._router.load

    async def place(
        self,
        prefix: Hashable,
        samples: int,
        home: int | None,
        *,
        begun: bool,
        deadline: GroupDeadline | None,
        timeout_s: float,
    ) -> int | None:
        """Wait for a replica with room for `samples` requests and assign them.

        None if the deadline has come, and if no replica serves (any more). Whoever comes first is placed first;
        requests that have been `begun` do not wait. `prefix` and `home`: see `Router.assign`. Raises RolloutError after
        `timeout_s`.
        """
        if self._limits is None or begun:
            return self._router.assign(prefix, samples, home)
        until = time.monotonic() + timeout_s
        place = object()
        self._queue.append(place)
        try:
            while True:
                load = self._router.load
                if not load:
                    return None
                full = self._limits.full(load, samples) if self._queue[0] is place else load
                if (index := self._router.assign(prefix, samples, home, full)) is not None:
                    return index
                now = time.monotonic()
                if deadline is not None and now >= deadline.at:
                    return None
                if now >= until:
                    raise RolloutError(
                        f"{samples} requests waited {timeout_s:.0f} s for room in a replica; requests in flight: {load}"
                    )
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    wait_s = min(until, deadline.at if deadline is not None else until) - now
                    await asyncio.wait_for(self._room.wait(), wait_s)
        finally:
            self._queue.remove(place)
            self._room.set()

    def reported(self, prefix: Hashable, replica: int, ended: int, load: EngineLoad) -> None:
        """Record a replica's report, in which `ended` responses ended."""
        self._peak |= load
        if self._limits is not None and replica in self._router.load:
            self._limits.reported(replica, load, self._router.load[replica], ended)
        self.finish(prefix, replica, ended)

    def finish(self, prefix: Hashable, replica: int, requests: int) -> None:
        """Record that a replica does not work on these requests any more."""
        self._router.finish(prefix, replica, requests)
        self._room.set()

    def take_load(self) -> EngineLoad:
        """Return the peaks of all replicas since the last call, as far as they have reported."""
        peak, self._peak = self._peak, EngineLoad()
        return peak

    def remove(self, replica: int) -> None:
        """Place nothing more on a replica; one that is not there is accepted."""
        self._router.remove(replica)
        if self._limits is not None:
            self._limits.forget(replica)
        self._room.set()

    def add(self, replica: int) -> None:
        """Add a new or restarted replica, which is idle. Raises ValueError if it is there already."""
        self._router.add(replica)
        self._room.set()
