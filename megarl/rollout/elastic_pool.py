"""Changes of the pool while a run goes on: replicas are listed, drained, removed and added, by hand or after a loss.

A change acts at once on where requests go, and on the publications from the next one on. The memory plan and the bounds
on what is in flight stay those of the start: they hold per engine, or follow from the batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.common.errors import NoPlace, RolloutError
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.fleet import Fleet
from megarl.rollout.replica import ReplicaStatus

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

STATUS_S = 5.0  # in which a replica says where it is and what it does
ROOM_S = 5.0  # in which Ray notices resources that were given back just now
LOOK_S = 0.2
GROW_S = 10.0  # between two looks for places of missing replicas
MOST_FAILURES = 3  # in a row of engines that are started in the place of missing ones


@dataclass(frozen=True)
class ReplicaReport:
    """One line of the list of replicas; `host` and `version` are empty if they are not known."""

    replica: int
    host: str
    state: str
    devices: tuple[str, ...]
    version: str
    running: int
    waiting: int


class ElasticPool:
    """Lists, drains, removes and adds replicas. It raises RolloutError with the fix for what cannot be done."""

    def __init__(
        self,
        fleet: Fleet,
        timeouts: TimeoutsConfig,
        start: Callable[[int], Awaitable[ActorHandle]],
        end: Callable[[ActorHandle], object],
        places: Callable[[], int],
        notify: Callable[[str], object],
    ) -> None:
        """`start(index)`: creates and starts an engine. `end`: kills one. `places()`: how many more Ray has room for.

        `notify`: tells the user what happens without a command.
        """
        self._fleet, self._timeouts, self._start, self._end = fleet, timeouts, start, end
        self._places, self._notify = places, notify
        self._removals: set[asyncio.Task[None]] = set()
        self._growth: asyncio.Task[None] | None = None
        self._told_missing = 0
        self._failures = 0  # in a row, of engines in the place of missing ones
        self._look_at = 0.0  # when places for missing ones are looked for again
        self._has_trainer = False

    def open(self) -> None:
        """Accept changes: the trainer has said which history it goes on with, and which replicas serve is known."""
        self._has_trainer = True

    async def reports(self) -> list[ReplicaReport]:
        """Return the state of all replicas, those that are started or end included, in their order."""
        members = self._fleet.membership
        reports = await asyncio.gather(*(self._report(index) for index in sorted(members.all | members.starting)))
        return list(reports)

    async def _report(self, index: int) -> ReplicaReport:
        status: ReplicaStatus | None = None
        if index not in self._fleet.membership.starting:
            try:
                status = await self._fleet.call(index, "status", timeout_s=STATUS_S)
            except (RolloutError, KeyError) as error:  # a KeyError: it has ended meanwhile
                logger.info("replica %d does not say what it does: %s", index, error)
        state = self._fleet.state_of(index)
        if status is None:
            return ReplicaReport(index, "", state, (), "", 0, 0)
        held = status.held
        return ReplicaReport(
            index, held.host, state, held.devices, status.version or "", status.running, status.waiting
        )

    async def drain(self, index: int) -> str:
        """Give a replica no more work, and wait until its responses have left it. Return what was done."""
        self._refuse_closed()
        self._refuse_unknown(index)
        drained = self._fleet.membership.drained
        if index in drained:
            raise RolloutError(f"replica {index} is drained already; `undrain` lets it serve again")
        self._refuse_last(index, "drained")
        moved = self._fleet.outstanding(index)
        self._fleet.drain_replica(index)
        logger.info("replica %d is drained; %d responses go on elsewhere", index, moved)
        await self._emptied(index)
        return f"replica {index} is drained; {moved} responses went on elsewhere"

    async def undrain(self, index: int) -> str:
        """Let a drained replica serve again after the next publication. Return what was done."""
        self._refuse_closed()
        self._refuse_unknown(index)
        if index not in self._fleet.membership.drained:
            raise RolloutError(f"replica {index} is not drained; it is {self._fleet.state_of(index)}")
        self._fleet.admit_drained(index)
        logger.info("replica %d is not drained any more", index)
        return f"replica {index} serves again after the next publication of the weights"

    async def remove(self, index: int) -> str:
        """Drain a replica and end its engine. Return what was done, or is still to be done."""
        self._refuse_closed()
        self._refuse_unknown(index)
        self._refuse_last(index, "removed")
        moved, busy = self._fleet.outstanding(index), self._fleet.membership.needed(index)
        self._fleet.leave(index)
        logger.info("replica %d is removed; %d responses go on elsewhere", index, moved)
        ending = asyncio.create_task(self._end_when_possible(index))
        self._removals.add(ending)
        ending.add_done_callback(self._removals.discard)
        if busy:
            return f"replica {index} leaves; its engine ends with the publication that is being made now"
        await asyncio.shield(ending)
        return f"replica {index} is removed; {moved} responses went on elsewhere, and its engine has ended"

    async def add(self, count: int) -> str:
        """Start `count` further engines, and wait until they are up. Return what was done.

        Raises RolloutError before anything starts if Ray has no room for them, and naming those that did not start.
        """
        if count < 1:
            raise RolloutError(f"{count} engines cannot be added: give a number of at least 1")
        self._refuse_closed()
        await self._refuse_without_room(count)
        indices = self._fleet.membership.reserve(count)
        logger.info("starting replicas %s", indices)
        ends = await asyncio.gather(*(self._start_one(index) for index in indices))
        up = [index for index, failure in zip(indices, ends, strict=True) if failure is None]
        joins = f"{_named(up)} joins the pool with the next publication of the weights" if up else "none was added"
        failed = [str(failure) for failure in ends if failure is not None]
        if failed:
            raise RolloutError(f"{len(failed)} of {count} engines did not start: {'; '.join(failed)}; {joins}")
        return joins

    async def tend(self) -> None:
        """Start engines in the place of missing ones if Ray has room again. Call it now and then; it does not wait."""
        members = self._fleet.membership
        if members.missing > self._told_missing:
            self._failures, self._look_at = 0, 0.0
            self._notify(
                f"the pool goes on with {len(members.members)} engines: there is no room for {members.missing} that "
                "were lost; they are started again when there is"
            )
        self._told_missing = members.missing
        now = time.monotonic()
        growing = self._growth is not None and not self._growth.done()
        if members.missing and not growing and now >= self._look_at and self._failures < MOST_FAILURES:
            self._look_at = now + GROW_S
            self._growth = asyncio.create_task(self._grow())

    async def _grow(self) -> None:
        members = self._fleet.membership
        count = min(members.missing, await asyncio.to_thread(self._places))
        if not count:
            return
        ends = await asyncio.gather(*(self._start_one(index) for index in members.reserve(count)))
        started = sum(end is None for end in ends)
        members.missing -= started
        self._told_missing = members.missing
        failed = [str(end) for end in ends if end is not None and not isinstance(end, NoPlace)]
        self._failures = self._failures + 1 if failed else 0
        if started:
            self._notify(f"{started} engines that were lost are up again; they join with the next publication")
        if failed:
            self._notify(f"{len(failed)} engines did not start in the place of lost ones: {failed[0]}")

    async def _start_one(self, index: int) -> Exception | None:
        """Start an engine and add it; return why it did not start."""
        try:
            self._fleet.add(index, await self._start(index))
        except Exception as error:
            logger.warning("replica %d did not start: %s", index, error)
            self._fleet.membership.not_started(index)
            return error
        return None

    async def _emptied(self, index: int) -> None:
        """Wait until no response is on a replica. It gives them up at its next report, or is lost."""
        limit_s = self._fleet.report_bound_s
        until = time.monotonic() + limit_s
        while left := self._fleet.outstanding(index):
            if time.monotonic() > until:
                raise RolloutError(
                    f"waited {limit_s:.0f} s for {left} responses to leave replica {index}; it gets no new ones"
                )
            await asyncio.sleep(LOOK_S)

    async def _end_when_possible(self, index: int) -> None:
        """End the engine of a replica that leaves. What it waits for has bounds of its own: reports, starts, syncs."""
        while not self._fleet.can_end(index):
            await asyncio.sleep(LOOK_S)
        self._end(self._fleet.ended(index))
        logger.info("replica %d has ended", index)

    async def _refuse_without_room(self, count: int) -> None:
        """Raise RolloutError if Ray has no room for `count` engines, also after a short time."""
        until = time.monotonic() + ROOM_S
        while (room := await asyncio.to_thread(self._places)) < count:
            if time.monotonic() > until:
                raise RolloutError(
                    f"{count} engines cannot be added: Ray has room for {room}. Remove others, add nodes to the Ray "
                    "cluster, or start the run with a larger rollout.max_replicas, which keeps places free"
                )
            await asyncio.sleep(LOOK_S)

    def _refuse_closed(self) -> None:
        if not self._has_trainer:
            raise RolloutError("the trainer has not begun to use the pool, or its new controller, yet; try again later")

    def _refuse_unknown(self, index: int) -> None:
        members = self._fleet.membership
        if index in members.starting:
            raise RolloutError(f"replica {index} is being started; try again when it is up")
        if index in members.leaving:
            raise RolloutError(f"replica {index} is being removed already")
        if index not in members.all:
            there = ", ".join(map(str, sorted(members.all)))
            raise RolloutError(f"there is no replica {index}; there are {there}")

    def _refuse_last(self, index: int, done: str) -> None:
        if not self._fleet.serves_without(index):
            raise RolloutError(
                f"replica {index} cannot be {done}: no other replica serves training now. Add one first, and wait "
                "until it serves"
            )


def _named(indices: Sequence[int]) -> str:
    return f"replica {indices[0]}" if len(indices) == 1 else f"each of the replicas {', '.join(map(str, indices))}"
