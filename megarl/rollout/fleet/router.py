"""Chooses replicas for requests. Requests wait until one has room, those of an evaluation behind those of training.

It picks the replica with the fewest outstanding requests, with prefix affinity: requests of one group (one prompt) go
to the replica of the group's first request, which has the prompt in its KV cache. If that replica has more than `slack`
outstanding requests above the least loaded one, they go elsewhere.

An engine with a full KV cache preempts requests and recomputes them later, while requests that wait outside can go to
another engine. So each engine has a limit that follows the classic rule of congestion control: additive increase,
multiplicative decrease. There is no limit before the first sign of pressure.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from megarl.common.errors import RolloutError
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.fleet.replica_table import Lease, Replica, ReplicaTable

logger = logging.getLogger(__name__)

SLACK = 64
FULL = 0.95  # share of the KV cache; below it, requests wait for other reasons
DECREASE = 0.75
ENDED_PER_INCREASE = 8


def has_room(replica: Replica, more: int) -> bool:
    """Return whether a replica has room for `more` requests. An idle one has room for any number."""
    return not replica.load or replica.load + more <= replica.limit


def adapt_limit(replica: Replica, load: EngineLoad, ended: int) -> None:
    """Adapt a replica's limit to its report, in which `ended` of `replica.load` requests ended.

    Under pressure the limit falls once, and again only after the requests above it have ended.
    """
    if load.waiting and load.kv_usage >= FULL:
        if replica.load <= replica.limit:
            replica.limit = max(replica.load * DECREASE, 1.0)
    else:
        replica.limit += ended / ENDED_PER_INCREASE


class PublicationHold:
    """Holds back requests and groups that have not begun, during a publication."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the longest duration; a longer wait fails."""
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
        """Start to hold back. An active hold continues."""
        if self._began_at is None:
            self._began_at = time.monotonic()
            self._open.clear()

    def end(self) -> None:
        """Release what is held back, if anything."""
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
        """Return the error of `what`, which was held back too long."""
        return RolloutError(
            f"{what} waited {self.limit_s:.0f} s for a publication to end that lets running responses end first "
            "(rollout.partial_rollout: false)"
        )


@dataclass(eq=False)
class _Place:
    """A waiting call. `look`: set when a replica may have room for it; only its owner clears it.

    `since`: when its wait for room began; `alone_since`: since when no replica serves.
    """

    background: bool
    since: float
    alone_since: float | None = None
    look: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    """Places requests on serving replicas, and keeps the queue of waiting ones."""

    def __init__(
        self, table: ReplicaTable, hold: PublicationHold, replacement_s: float = math.inf, slack: int = SLACK
    ) -> None:
        """`hold`: holds back new requests. `replacement_s`: how long requests wait while no replica serves."""
        self._table, self._hold, self._replacement_s, self._slack = table, hold, replacement_s, slack
        self._home: dict[Hashable, int] = {}
        self._open: dict[Hashable, int] = {}
        self._queue: list[_Place] = []  # in order of arrival
        self._peak = EngineLoad()
        table.on_change = self.look_again

    async def place(
        self, context: RequestContext, samples: int, tokens: int, *, background: bool, timeout_s: float
    ) -> Lease | None:
        """Wait for a replica with room for `samples` requests and assign them; None if their deadline has passed.

        Training comes before requests in the `background`, each in order of arrival. Requests that have begun
        (`tokens` > 0) wait neither for room nor for the end of a hold. While no replica serves, all wait for one that
        is coming.

        Raises NoReplicaLeft with the reason of the last loss if no replica is coming, or none came in time;
        RolloutError after `timeout_s`, not counting a hold, or if the hold lasts too long.
        """
        place = _Place(background, time.monotonic())
        self._queue.append(place)
        end = math.inf if context.deadline is None else context.deadline.at
        try:
            while True:
                if (lease := self._assign_next(place, context, samples, tokens)) is not None:
                    return lease
                until, error = self._limit(place, samples, tokens, timeout_s)
                now = time.monotonic()
                if now >= end:
                    return None
                if now >= until:
                    raise error
                place.look.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(until, end) - now):
                        await place.look.wait()
        finally:
            self._queue.remove(place)
            self._wake_next()

    def _assign_next(self, place: _Place, context: RequestContext, samples: int, tokens: int) -> Lease | None:
        """Assign requests that have begun; assign others if they are not held back and are first in the queue."""
        if not tokens and (self._hold.active or not self._is_next(place)):
            return None
        return self.assign(context.prefix, samples, context.home, context.near, any_room=tokens > 0)

    def _limit(self, place: _Place, samples: int, tokens: int, timeout_s: float) -> tuple[float, RolloutError]:
        """Return until when (`time.monotonic`) requests may wait, and the error after that.

        Raises NoReplicaLeft if no replica serves and none is coming.
        """
        now = time.monotonic()
        if serving := self._table.serving:
            if place.alone_since is not None:
                place.since, place.alone_since = now, None
            if not tokens and self._hold.active:
                return self._hold.until, self._hold.too_long(f"{samples} requests")
            in_flight = {each.index: each.load for each in serving}
            waited = (
                f"{samples} requests waited {timeout_s:.0f} s for room in a replica; requests in flight: {in_flight}"
            )
            return max(place.since, self._hold.ended_at) + timeout_s, RolloutError(waited)
        if not self._table.coming:
            raise self._table.none_left()
        if place.alone_since is None:
            place.alone_since = now
            logger.warning("no replica serves: %d responses with %d tokens wait for a new one", samples, tokens)
        limit = f"{self._replacement_s:.0f} s (timeouts.weight_sync_s and engine_start_s)"
        lost = self._table.none_left(f"{samples} responses waited {limit} for a new replica after: ")
        return place.alone_since + self._replacement_s, lost

    def assign(
        self, prefix: Hashable, samples: int, number: int | None = None, near: int | None = None, *,
        any_room: bool = False,
    ) -> Lease | None:  # fmt: skip
        """Choose a replica for `samples` requests that share `prefix`, and count them as outstanding.

        `near`: a replica that has the prefix in its cache without outstanding requests, as between two turns of a
        dialogue. With `number`, the choice depends only on that number modulo the number of serving replicas. Returns
        None if none serves or has room, or if the replica of `number` has none; with `any_room` every replica has room.
        """
        serving = self._table.serving
        if number is not None and serving:
            serving = [serving[number % len(serving)]]
        open_ = {each.index: each for each in serving if any_room or has_room(each, samples)}
        if not open_:
            return None
        chosen = min(open_.values(), key=lambda each: (each.load, each.index))
        home = open_.get(self._home.get(prefix, near))  # type: ignore[arg-type]  # None is no index
        if home is not None and home.load - chosen.load <= self._slack:
            chosen = home
        self._home[prefix] = chosen.index
        self._open[prefix] = self._open.get(prefix, 0) + samples
        chosen.load += samples
        return chosen.lease()

    def _is_next(self, place: _Place) -> bool:
        """Return whether a place in the queue is the first."""
        return next((each for each in self._queue if not each.background), self._queue[0]) is place

    def _wake_next(self) -> None:
        """Wake the first place of either kind, because a replica may have room; no other could be assigned."""
        for background in (False, True):
            first = next((place for place in self._queue if place.background == background), None)
            if first is not None:
                first.look.set()

    def look_again(self) -> None:
        """Wake all places: replicas came or went, or a hold began or ended."""
        for place in self._queue:
            place.look.set()

    def reported(self, prefix: Hashable, lease: Lease, ended: int, load: EngineLoad) -> None:
        """Record a replica's report, in which `ended` responses ended."""
        self._peak |= load
        if lease.valid:
            adapt_limit(lease.replica, load, ended)
        self.release(prefix, lease, ended)

    def release(self, prefix: Hashable, lease: Lease, samples: int) -> None:
        """Record that a replica has stopped working on `samples` (>= 0) requests.

        Raises ValueError if it has fewer outstanding ones; a replica that gave them up counts none.
        """
        if samples:
            if lease.valid:
                if samples > lease.replica.load:
                    index, load = lease.replica.index, lease.replica.load
                    raise ValueError(f"replica {index} has {load} outstanding samples, not {samples}")
                lease.replica.load -= samples
            self._open[prefix] -= samples
            if self._open[prefix] <= 0:
                del self._open[prefix]
                self._home.pop(prefix, None)
        self._wake_next()

    def take_load(self) -> EngineLoad:
        """Return the reported peaks of all replicas since the last call."""
        peak, self._peak = self._peak, EngineLoad()
        return peak
