"""Chooses the replica of the next requests; until one has room they wait, those of an evaluation behind training's."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from megarl.common.errors import RolloutError
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.fleet.drain import PublicationHold

# The choice of the replica for the next requests. Pure: no clock, no processes.
#
# The replica with the fewest outstanding samples is chosen, with prefix affinity: requests of one group (one prompt) go
# to the replica of the group's first request, which has the prompt in its KV cache, unless that replica has more than
# `slack` outstanding samples above the least loaded one.


class Router:
    """Counts outstanding samples per replica and assigns requests."""

    def __init__(self, replicas: Iterable[int], slack: int = 64) -> None:
        """`slack`: outstanding samples above the least loaded replica up to which affinity holds (>= 0).

        Raises ValueError without a replica.
        """
        self._load: dict[int, int] = dict.fromkeys(sorted(replicas), 0)
        self._home: dict[Hashable, int] = {}
        self._open: dict[Hashable, int] = {}
        self.slack = slack
        if not self._load:
            raise ValueError("routing needs at least one replica")

    @property
    def load(self) -> dict[int, int]:
        """The number of outstanding samples per serving replica."""
        return dict(self._load)

    def assign(
        self,
        prefix: Hashable,
        samples: int,
        number: int | None = None,
        full: Container[int] = (),
        near: int | None = None,
    ) -> int | None:
        """Choose a replica for `samples` requests that share `prefix`, and count them as outstanding.

        `near`: a replica that has the prefix in its cache although no request is outstanding there, as between two
        turns of a dialogue. With `number` the choice depends on nothing but that number modulo the number of serving
        replicas. None if the chosen replica, or without `number` every replica, is in `full`, and if there is no
        replica.
        """
        open_ = [replica for replica in self._load if replica not in full]
        if number is not None:
            open_ = [each for each in open_ if each == sorted(self._load)[number % len(self._load)]]
        if not open_:
            return None
        chosen = min(open_, key=lambda replica: (self._load[replica], replica))
        home = self._home.get(prefix, near)
        if home in open_ and self._load[home] - self._load[chosen] <= self.slack:
            chosen = home
        self._home[prefix] = chosen
        self._open[prefix] = self._open.get(prefix, 0) + samples
        self._load[chosen] += samples
        return chosen

    def release(self, prefix: Hashable, replica: int, samples: int) -> None:
        """Record that `samples` requests (>= 0), which `assign` gave to `replica`, are done.

        A removed replica is accepted. Raises ValueError if the replica has fewer outstanding samples.
        """
        if not samples:
            return
        if replica in self._load:
            if samples > self._load[replica]:
                raise ValueError(f"replica {replica} has {self._load[replica]} outstanding samples, not {samples}")
            self._load[replica] -= samples
        self._open[prefix] -= samples
        if self._open[prefix] <= 0:
            del self._open[prefix]
            self._home.pop(prefix, None)

    def remove(self, replica: int) -> None:
        """Remove a replica that is lost; one that is not there is accepted."""
        self._load.pop(replica, None)
        self._home = {prefix: home for prefix, home in self._home.items() if home != replica}

    def add(self, replica: int) -> None:
        """Add a new or restarted replica, which is idle. Raises ValueError if it is in the pool already."""
        if replica in self._load:
            raise ValueError(f"replica {replica} is already in the pool")
        self._load[replica] = 0


# The number of requests that an engine gets at a time, by the room in its KV cache. Pure.
#
# An engine whose cache is full throws requests out of its batch and computes them again later. Requests that wait
# outside can go to another engine instead. So each engine has a limit that follows the classic rule of congestion
# control: additive increase, multiplicative decrease. There is no limit before the first sign of pressure.

FULL = 0.95  # share of the KV cache; a request that waits for another reason sees less
DECREASE = 0.75
ENDED_PER_INCREASE = 8


class BackPressure:
    """Keeps a limit for each replica, from its reports."""

    def __init__(self) -> None:
        self._limits: dict[int, float] = {}

    def limit(self, replica: int) -> float:
        """Return how many requests a replica may have in flight; infinity if nothing is known against more."""
        return self._limits.get(replica, math.inf)

    def full(self, in_flight: Mapping[int, int], more: int) -> set[int]:
        """Return the replicas that have no room for `more` requests. One that is idle has room for any number."""
        return {replica for replica, now in in_flight.items() if now and now + more > self.limit(replica)}

    def reported(self, replica: int, load: EngineLoad, in_flight: int, ended: int) -> None:
        """Adapt a replica's limit to its report, made when it had `in_flight` requests, of which `ended` ended.

        Under pressure the limit falls once, and not again before the requests above it have ended.
        """
        limit = self.limit(replica)
        if load.waiting and load.kv_usage >= FULL:
            if in_flight <= limit:
                self._limits[replica] = max(in_flight * DECREASE, 1.0)
        elif limit < math.inf:
            self._limits[replica] = limit + ended / ENDED_PER_INCREASE

    def forget(self, replica: int) -> None:
        """Forget a replica that is lost or new."""
        self._limits.pop(replica, None)


@dataclass(eq=False)
class _Place:
    """One that waits for room. `look`: set when it may have got some; only its owner clears it."""

    background: bool
    look: asyncio.Event = field(default_factory=asyncio.Event)


class Dispatcher:
    """A router, limits by back-pressure, and the queue of those that are held back."""

    def __init__(self, replicas: Iterable[int], hold: PublicationHold | None = None) -> None:
        """`hold`: whether all requests are held back that have not begun; None: never."""
        self._hold = hold or PublicationHold(math.inf)
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
