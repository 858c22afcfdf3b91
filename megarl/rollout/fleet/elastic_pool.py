"""Changes of the pool during a run: lists, drains, removes and adds replicas, on command or after a loss.

A change affects the routing of requests at once, and publications from the next one on. The memory plan and the bounds
on work in flight stay as they were at the start: they hold per engine, or follow from the batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.common.errors import NoPlace, RolloutError
from megarl.common.values import counted
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.engine.replica_start import EndedReplica, replica_name
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.fleet.replica_table import Replica, State
from megarl.rollout.transport.rpc import ReplicaClient
from megarl.telemetry.trace import events

if TYPE_CHECKING:
    from ray.actor import ActorHandle


async def find_replicas(namespace: str, count: int, start_s: float, wait: bool) -> dict[int, Any]:
    """Return the run's first `count` actors, by index. Without `wait`, a missing actor counts as ended."""
    import ray

    replicas: dict[int, Any] = {}
    deadline = time.monotonic() + start_s
    while len(replicas) < count:
        index = len(replicas)
        try:
            replicas[index] = ray.get_actor(replica_name(index), namespace=namespace)
        except ValueError:
            if not wait:
                replicas[index] = EndedReplica(index)
                continue
            if time.monotonic() > deadline:
                raise RolloutError(f"the controller waited {start_s:.0f} s for replica {index}") from None
            await asyncio.sleep(0.05)
    return replicas


logger = logging.getLogger(__name__)

STATUS_S = 5.0  # in which a replica reports its status
ROOM_S = 5.0  # in which Ray notices freed resources
LOOK_S = 0.2
GROW_S = 10.0  # between two checks for room for missing replicas
MOST_FAILURES = 3  # starts in a row that may fail for missing engines


@dataclass(frozen=True)
class ReplicaReport:
    """One line of the list of replicas; `host` and `version` are empty if unknown."""

    replica: int
    host: str
    state: str
    devices: tuple[str, ...]
    version: str
    running: int
    waiting: int


class ElasticPool:
    """Lists, drains, removes and adds replicas. Raises RolloutError with the fix for what cannot be done."""

    def __init__(
        self,
        fleet: EnginePool,
        timeouts: TimeoutsConfig,
        start: Callable[[int, Callable[[], object]], Awaitable[ActorHandle]],
        end: Callable[[ActorHandle], object],
        places: Callable[[], int],
        notify: Callable[[str], object],
        *,
        fixed: bool = False,
    ) -> None:
        """`start(index, placed)`: creates and starts an engine, and calls `placed` once Ray has placed it.

        `end`: kills an engine. `places()`: how many more fit into the Ray cluster; it runs in a thread. `notify`:
        reports to the user what happens without a command. `fixed`: no engine starts or ends, because the trainer may
        have its GPU.
        """
        self._fixed = fixed
        self._fleet, self._timeouts, self._start, self._end = fleet, timeouts, start, end
        self._places, self._notify = places, notify
        self._removals: set[asyncio.Task[None]] = set()
        self._growth: asyncio.Task[None] | None = None
        self._reserving = asyncio.Lock()  # held from the check for free places until they are reserved
        self._look: asyncio.Future[int] | None = None
        self._reported_missing = 0
        self._failures = 0  # in a row, of starts for missing engines
        self._look_at = 0.0  # next check for room for missing engines
        self._has_trainer = False

    def open(self) -> None:
        """Accept changes: the trainer has named the history it resumes, and it is known which replicas serve."""
        self._has_trainer = True

    async def reports(self) -> list[ReplicaReport]:
        """Return the state of all replicas in order, including starting and leaving ones."""
        return list(await asyncio.gather(*(self._report(each) for each in self._fleet.table)))

    async def _report(self, replica: Replica) -> ReplicaReport:
        index, status = replica.index, None
        if replica.client is not None:
            try:
                status = await replica.client.call("status", timeout_s=STATUS_S)
            except RolloutError as error:
                logger.info("replica %d does not report its status: %s", index, error)
        if status is None:
            return ReplicaReport(index, "", replica.does, (), "", 0, 0)
        held = status.held
        return ReplicaReport(
            index, held.host, replica.does, held.devices, status.version or "", status.running, status.waiting
        )

    async def drain(self, index: int) -> str:
        """Give a replica no more work, and wait until its responses have moved. Return what was done."""
        if self._find(index).drained:
            raise RolloutError(f"replica {index} is already drained; `undrain` lets it serve again")
        self._refuse_last(index, "drained")
        moved = self._fleet.outstanding(index)
        self._fleet.table.drain(index)
        logger.info("replica %d is drained; %d responses continue elsewhere", index, moved)
        await self._emptied(index)
        return f"replica {index} is drained; {moved} responses continue elsewhere"

    async def undrain(self, index: int) -> str:
        """Let a drained replica serve again after the next publication. Return what was done."""
        if not (replica := self._find(index)).drained:
            raise RolloutError(f"replica {index} is not drained; it is {replica.does}")
        self._fleet.table.undrain(index)
        logger.info("replica %d is undrained", index)
        return f"replica {index} serves again after the next publication of the weights"

    async def remove(self, index: int) -> str:
        """Drain a replica and end its engine. Return what was done, or will be."""
        self._refuse_fixed()
        replica = self._find(index)
        self._refuse_last(index, "removed")
        moved = self._fleet.outstanding(index)
        self._fleet.table.leave(index)
        logger.info("replica %d is removed; %d responses continue elsewhere", index, moved)
        ending = asyncio.create_task(self._end_when_possible(replica))
        self._removals.add(ending)
        ending.add_done_callback(self._removals.discard)
        if replica.published:
            return f"replica {index} leaves; its engine ends after the current publication"
        await asyncio.shield(ending)
        return f"replica {index} is removed; {moved} responses continue elsewhere, and its engine has ended"

    async def add(self, count: int) -> str:
        """Start `count` more engines, and wait until they are up. Return what was done.

        Raises RolloutError if Ray has no room for them, before anything starts, or naming those that did not start.
        """
        if count < 1:
            raise RolloutError(f"cannot add {count} engines: give a number of at least 1")
        self._refuse_fixed()
        self._refuse_closed()
        indices = await self._reserve_all(count)
        logger.info("starting replicas %s", indices)
        ends = await asyncio.gather(*(self._start_one(index) for index in indices))
        up = [index for index, failure in zip(indices, ends, strict=True) if failure is None]
        joins = f"{_named(up)} joins the pool with the next publication of the weights" if up else "none was added"
        failed = [str(failure) for failure in ends if failure is not None]
        if failed:
            raise RolloutError(f"{len(failed)} of {count} engines did not start: {'; '.join(failed)}; {joins}")
        return joins

    async def replace_later(self, indices: Sequence[int]) -> None:
        """End replicas on which a publication failed, so that it continues without them; `tend` starts new ones.

        If no other replica serves training, restart them and wait. Raises RolloutError as `EnginePool.restart`.
        """
        table = self._fleet.table
        if not table.go_on_without(indices):
            await self._fleet.restart(indices)
            return
        table.excuse_leaving()
        for index in {each.index for each in table.members} & set(indices):
            logger.warning("the pool continues without replica %d and starts a new one", index)
            self._end_engine(table.give_up(index))

    async def tend(self) -> None:
        """Start replacements of missing engines if Ray has room again. Call it now and then; it does not wait."""
        table = self._fleet.table
        if self._fixed:
            return
        if table.missing > self._reported_missing:
            self._failures, self._look_at = 0, 0.0
            self._notify(
                f"the pool continues with {counted(len(table.members), 'engine')}; {table.missing} lost, which will be "
                "replaced as soon as there is room"
            )
        self._reported_missing = table.missing
        now = time.monotonic()
        growing = self._growth is not None and not self._growth.done()
        if table.missing and not growing and now >= self._look_at and self._failures < MOST_FAILURES:
            self._look_at = now + GROW_S
            self._growth = asyncio.create_task(self._grow())

    async def _grow(self) -> None:
        table = self._fleet.table
        try:
            indices, _ = await self._reserve(1, table.missing)
        except Exception as error:
            self._failures += 1
            logger.exception("missing engines could not be started")
            self._notify(f"engines that were lost could not be started again: {error}")
            return
        ends = await asyncio.gather(*(self._start_one(index) for index in indices))
        started = sum(end is None for end in ends)
        table.missing -= started
        self._reported_missing = table.missing
        failed = [str(end) for end in ends if end is not None and not isinstance(end, NoPlace)]
        self._failures = self._failures + 1 if failed else 0
        if started:
            self._notify(f"replaced lost engines: {started}; they join with the next publication")
            events.recovery("engine", f"replaced lost engines: {started}")
        if failed:
            self._notify(f"replacements of lost engines that did not start: {len(failed)}; {failed[0]}")

    async def _start_one(self, index: int) -> Exception | None:
        """Start an engine and add it; return its error if it did not start."""
        table = self._fleet.table
        try:
            actor = await self._start(index, lambda: table.placed(index))
        except Exception as error:
            logger.warning("replica %d did not start: %s", index, error)
            table.forget(index)
            return error
        table.started(index, self._fleet.client(index, actor))
        return None

    async def _emptied(self, index: int) -> None:
        """Wait until a replica has no responses. It gives them up at its next report, or is lost."""
        limit_s = self._fleet.report_bound_s
        until = time.monotonic() + limit_s
        while left := self._fleet.outstanding(index):
            if time.monotonic() > until:
                raise RolloutError(
                    f"waited {limit_s:.0f} s for {left} responses to leave replica {index}; it gets no new ones"
                )
            await asyncio.sleep(LOOK_S)

    async def _end_when_possible(self, replica: Replica) -> None:
        """End the engine of a leaving replica. Each thing it waits for has its own timeout: reports, starts, syncs."""
        while not self._fleet.can_end(replica):
            await asyncio.sleep(LOOK_S)
        if replica.index in self._fleet.table:
            self._end_engine(self._fleet.table.forget(replica.index))
        logger.info("replica %d has ended", replica.index)

    def _end_engine(self, client: ReplicaClient | None) -> None:
        if client is not None:
            self._end(client.actor)

    async def _reserve_all(self, count: int) -> list[int]:
        """Reserve places for `count` engines. Raises RolloutError if Ray has no room for them after `ROOM_S`."""
        until = time.monotonic() + ROOM_S
        while True:
            indices, room = await self._reserve(count, count)
            if indices:
                return indices
            if time.monotonic() > until:
                placing = self._fleet.table.unplaced
                besides = f" besides {placing} that are being started" if placing else ""
                raise RolloutError(
                    f"cannot add {counted(count, 'engine')}: Ray has room for {room}{besides}. Remove others, add "
                    "nodes to the Ray cluster, or start the run with a larger rollout.max_replicas, which keeps places "
                    "free"
                )
            await asyncio.sleep(LOOK_S)

    async def _reserve(self, least: int, most: int) -> tuple[list[int], int]:
        """Reserve all free places up to `most`, or none if fewer than `least` are free.

        Return the indices, and how many places were free.
        """
        async with self._reserving:
            room = await self._room()
            return self._fleet.table.reserve(min(room, most)) if room >= least else [], room

    async def _room(self) -> int:
        """Return how many more engines Ray has room for, besides those that are starting.

        Raises RolloutError after `timeouts.rpc_s`. The asking thread cannot be ended; the next one waits for its end.
        """
        rpc_s, placing = self._timeouts.rpc_s, self._fleet.table.unplaced
        try:
            async with asyncio.timeout(rpc_s):
                if self._look is not None:
                    await asyncio.wait([self._look])
                self._look = asyncio.ensure_future(asyncio.to_thread(self._places))
                self._look.add_done_callback(lambda look: look.cancelled() or look.exception())  # may be unawaited
                return max(0, await asyncio.shield(self._look) - placing)
        except TimeoutError:
            raise RolloutError(
                f"the rollout controller waited {rpc_s:.0f} s (timeouts.rpc_s) for Ray to name the free places of its "
                "nodes: Ray's head is overloaded or cannot be reached; try again later"
            ) from None

    def _refuse_fixed(self) -> None:
        if self._fixed:
            raise RolloutError(
                "engines on the trainer's GPUs (rollout.share_gpus) cannot be added or removed while the run lasts; "
                "stop it, and resume it with another rollout.replicas"
            )

    def _refuse_closed(self) -> None:
        if not self._has_trainer:
            raise RolloutError("the trainer does not use the pool, or its new controller, yet; try again later")

    def _find(self, index: int) -> Replica:
        """Return a replica that can be changed."""
        self._refuse_closed()
        table = self._fleet.table
        if index not in table:
            there = ", ".join(str(each.index) for each in table if each.state is not State.STARTING)
            raise RolloutError(f"there is no replica {index}; the replicas are {there}")
        replica = table[index]
        if replica.state is State.STARTING:
            raise RolloutError(f"replica {index} is being started; try again when it is up")
        if replica.leaving:
            raise RolloutError(f"replica {index} is already being removed")
        return replica

    def _refuse_last(self, index: int, done: str) -> None:
        if not self._fleet.table.serves_without(index):
            raise RolloutError(
                f"replica {index} cannot be {done}: no other replica serves training now. Add one first, and wait "
                "until it serves"
            )


def _named(indices: Sequence[int]) -> str:
    return f"replica {indices[0]}" if len(indices) == 1 else f"each of the replicas {', '.join(map(str, indices))}"
