"""The replicas of a run: they answer requests and take part in publications, and lost ones are replaced.

The config gives the number of replicas at the start; later only the pool knows it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.common.errors import NoPlace, ReplicaFailed, RolloutError
from megarl.common.process.held_outputs import hold_within
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.agents.batch_stats import BusyClock
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.placement import HeldDevices
from megarl.rollout.fleet.calls import GROUP_TERMS, CallRunner, CallTerms
from megarl.rollout.fleet.replica_table import Replica, ReplicaTable
from megarl.rollout.fleet.router import PublicationHold, Router
from megarl.rollout.fleet.speed import rate_metrics
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.gather import Turn
from megarl.rollout.transport.rpc import ReplicaClient, as_rollout_error

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

# A lost replica that does not answer within this time does not answer the weight sync either.
_RETIRE_S = 2.0
_RESET_S = 5.0  # in which a healthy lost replica drops its requests

# Ends an actor and starts a new one with the same index; raises ReplicaFailed if it does not come up.
Restart = Callable[[int, "ActorHandle"], Awaitable["ActorHandle"]]


class EnginePool:
    """Holds all replicas: serving ones, lost ones, and those that join at the next version.

    Requests of one call go to one replica; if it is lost, another one continues its responses (`calls.py`). A lost
    replica that turns out to be healthy serves again after the next weight sync. `table`: the state of each replica.
    """

    def __init__(
        self,
        replicas: Mapping[int, ActorHandle],
        timeouts: TimeoutsConfig,
        restart: Restart,
        describe: Callable[[int], str] = str,
        *,
        report_interval_s: float,
        sync_restarts: int,
        shrinks: bool = True,
    ) -> None:
        """`replicas`: started EngineReplica actors by index. `describe(index)`: where a replica's log is.

        `report_interval_s`: at most this many seconds of tokens are lost with a replica. `sync_restarts`: how often a
        failed sync is repeated (`weight_sync.restarts`). `shrinks`: it continues without a replica that has no place.
        """
        self._timeouts, self._restart, self._describe, self._shrinks = timeouts, restart, describe, shrinks
        # A report lacks the tokens that an engine holds back, so ask earlier by as much.
        self._report_interval_s = report_interval_s - hold_within(report_interval_s)
        clients = {index: self.client(index, actor) for index, actor in replicas.items()}
        self.table = ReplicaTable(clients, replaces=sync_restarts > 0)
        replacement_s = all_attempts_s(timeouts, sync_restarts)
        # As long as running responses may take to end, and then a weight sync with all its attempts.
        self._hold = PublicationHold(timeouts.generate_s + replacement_s)
        self._router = Router(self.table, self._hold, replacement_s)
        self._calls = CallRunner(self.table, self._router, timeouts, self._report_interval_s)

    def client(self, index: int, actor: ActorHandle) -> ReplicaClient:
        """Return a client for the actor of a replica."""
        return ReplicaClient(index, actor, self._timeouts.rpc_s, self._describe(index))

    async def call(self, index: int, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call a method of a replica; see `ReplicaClient.call`. Also raises ReplicaFailed if it has left the pool."""
        client = self.table[index].client if index in self.table else None
        if client is None:
            raise ReplicaFailed(index, f"replica {index} has left the pool")
        return await client.call(method, *args, timeout_s=timeout_s)

    @property
    def members(self) -> list[int]:
        """Indices of the replicas that take part in the current publication, or else in the next one."""
        return [each.index for each in self.table.members]

    @property
    def serving(self) -> list[int]:
        """Indices of the replicas that serve, sorted."""
        return [each.index for each in self.table.serving]

    @property
    def idle(self) -> list[int]:
        """Indices of the replicas that start, wait for their first weights, or are drained, sorted."""
        return [each.index for each in self.table.idle]

    @property
    def lost(self) -> dict[int, ReplicaFailed]:
        """The replicas that failed and do not serve, with the reasons, the last lost one at the end."""
        return self.table.lost

    @property
    def needs_publication(self) -> str:
        """Why the trainer must publish its weights now: only that brings back a replica. Empty if it need not."""
        if self.table.serving or self.table.under_way or not (lost := self.lost):
            return ""
        return str(next(reversed(lost.values())))

    def expect_publication(self, publishes: bool) -> None:
        """Record whether a trainer publishes when asked to (`needs_publication`).

        Responses whose last replica is lost then wait for that instead of ending the run.
        """
        self.table.expects = publishes
        self._router.look_again()

    def take_load(self) -> EngineLoad:
        """Return the reported peaks of all replicas since the last call."""
        return self._router.take_load()

    def take_rates(self) -> dict[str, float]:
        """Return the speed of each replica since the last call as metrics."""
        return rate_metrics({each.index: each.work for each in self.table})

    async def generate(
        self,
        context: RequestContext,
        requests: Sequence[GenerateRequest],
        *,
        background: bool = False,
        terms: CallTerms = GROUP_TERMS,
    ) -> list[GenerateResult]:
        """Return responses in the order of `requests`, which share the `context`.

        `terms`: how they differ from calls for training groups. `background`: they belong to an evaluation alongside
        training and give way to training. They have no time limit; the wait for the evaluation has one.

        Raises RequestFailed if an engine refused them, and NoReplicaLeft if the last replica was lost and none is
        coming. Raises RolloutError if the group fails at its deadline, or if no replica has room or one has not
        finished them within `timeouts.generate_s`.
        """
        return await self._calls.run(context, requests, background, terms)

    @property
    def report_bound_s(self) -> float:
        """The longest time until a replica has reported, or is lost."""
        return self._report_interval_s + 2 * self._timeouts.rpc_s

    def outstanding(self, index: int) -> int:
        """Return the number of unfinished responses of a replica, including those a drained one gives up."""
        return self._calls.on(index)

    def can_end(self, replica: Replica) -> bool:
        """Return whether the engine of a leaving replica can end: no call, publication or restart uses it."""
        return not (self._calls.on(replica.index) or replica.published or replica.coming)

    async def begin_sync(self) -> None:
        """Record that a weight sync is about to begin, and try to readmit lost replicas.

        A lost replica may be healthy: its report was late, or the network was cut. If it can drop its requests, it
        serves again after the sync. Otherwise it is made to refuse the sync, so that it is replaced. If failed syncs
        end the run (`weight_sync.restarts` is 0), it takes part instead, but does not serve again.
        """
        self.table.begin_sync()
        lost = [each for each in self.table if each.lost and not each.coming]
        await asyncio.gather(*(self._readmit(each, self.table.sync_replaces) for each in lost))

    async def _drop_requests(self, replica: Replica, timeout_s: float) -> ReplicaFailed | None:
        """Make an engine drop its requests, so that a lost one joins. Return the error if it could not."""
        try:
            await self.call(replica.index, "reset", timeout_s=timeout_s)
        except RolloutError as error:
            return ReplicaFailed(replica.index, str(error))
        self.table.join(replica.index)
        return None

    async def _readmit(self, replica: Replica, replaces: bool) -> None:
        """Let a healthy lost replica join. Make others refuse the sync, if it `replaces` those that do."""
        index, reason = replica.index, replica.failure
        if not replica.condemned:
            if (error := await self._drop_requests(replica, _RESET_S)) is None:
                return
            logger.info("replica %d stays lost: %s", index, error)
        if not replaces or not replica.lost:  # it may have been removed meanwhile
            return
        try:
            await self.call(index, "fail", f"was lost: {reason}", timeout_s=_RETIRE_S)
        except RolloutError as failure:
            logger.info("lost replica %d was not notified: %s", index, failure)

    async def drain(self, timeout_s: float) -> None:
        """Hold back new requests until `admit_joining` or `reset`, and wait until running ones have ended.

        Foreign ones are not waited for. After `timeout_s` nothing is held back, and RolloutError names the replicas and
        their numbers of requests.
        """
        self._hold.begin()
        try:
            await self._calls.end(timeout_s)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Release the requests that `drain` holds back."""
        self._hold.end()
        self._router.look_again()

    async def may_begin(self) -> None:
        """Wait until requests are not held back by `drain`. Raises RolloutError if that takes too long."""
        await self._hold.wait("a prompt group")

    def admit_joining(self) -> None:
        """Let all replicas serve but drained ones, including replaced and new ones. Call it after a complete sync."""
        self.table.admit()
        self._let_go()

    async def restart(self, indices: Sequence[int]) -> None:
        """Replace replicas by new ones under the same names, which serve only after `admit_joining`.

        One without a place, for example because its node is lost, leaves the pool if that `shrinks` and another one is
        left. Raises RolloutError if one does not come up. The controller owns them: a rank's actors end with the rank.
        """
        self.table.excuse_leaving()
        wanted = [each for index in indices if index in self.table and not (each := self.table[index]).leaving]
        ends = await asyncio.gather(*(self._restart_one(each) for each in wanted), return_exceptions=True)
        failures = {each.index: end for each, end in zip(wanted, ends, strict=True) if end is not None}
        left = [each for each in self.table.members if not each.drained and each.index not in failures]
        for error in failures.values():
            if not (isinstance(error, NoPlace) and left and self._shrinks):
                raise error
        for index, error in failures.items():
            logger.warning("the pool continues without replica %d: %s", index, error)
            self.table.give_up(index)

    async def _restart_one(self, replica: Replica) -> None:
        assert replica.client is not None  # starting replicas take no part in publications
        index = replica.index
        self.table.restarting(index)
        try:
            actor = await self._restart(index, replica.client.actor)
        except BaseException as error:
            reason = as_rollout_error(index, "restart", error, self._describe(index))
            self.table.not_restarted(replica, ReplicaFailed(index, str(reason)))
            raise
        self.table.restarted(replica, self.client(index, actor))

    async def reset(self) -> None:
        """Make every engine drop its requests and be ready to serve; replace those that cannot or are condemned.

        Lost ones serve again after `admit_joining`.
        """
        self.table.end_sync()
        self._let_go()
        broken = []

        async def reset_one(replica: Replica) -> None:
            condemned = replica.failure if replica.condemned else None
            if (reason := condemned or await self._drop_requests(replica, self._timeouts.rpc_s)) is not None:
                logger.warning("replacing replica %d: %s", replica.index, reason)
                broken.append(replica.index)

        await asyncio.gather(*(reset_one(each) for each in self.table.members))
        await self.restart(sorted(broken))

    async def take_over(self, *, in_sync: bool) -> None:
        """Make every engine drop the requests of a dead controller. Engines that cannot are lost.

        The next sync readmits or replaces them. `in_sync`: the trainer is in the middle of a sync.
        """

        async def take(replica: Replica) -> None:
            if (reason := await self._drop_requests(replica, self._timeouts.rpc_s)) is not None:
                self.table.lose(replica.index, reason)

        if in_sync:
            self.table.begin_sync()
        await asyncio.gather(*(take(each) for each in self.table.members))
        for index, reason in self.lost.items():
            logger.warning("replica %d does not serve until the next publication: %s", index, reason)

    async def devices(self) -> list[HeldDevices]:
        """Return the devices that each serving replica holds."""
        return [await self.call(index, "devices", timeout_s=self._timeouts.rpc_s) for index in self.serving]


def all_attempts_s(timeouts: TimeoutsConfig, sync_restarts: int) -> float:
    """Return the seconds that all attempts at a weight sync can take, including the restarts between them."""
    return (sync_restarts + 1) * timeouts.weight_sync_s + sync_restarts * timeouts.engine_start_s


class RequestCoalescer:
    """Sends requests that share a prefix and a turn of the event loop in one Ray call, which costs 50 short tokens."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        chunk: int | None = None,
        in_turn: bool = False,
        background: bool = False,
        clock: BusyClock | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk`: the most requests in one call; None: no bound. `clock` records when calls are sent and answered.

        `in_turn`: calls without a home go to the replicas in turn, not by load. `background`: see
        `EnginePool.generate`.
        """
        self._pool, self._chunk, self._in_turn, self._clock, self._now = pool, chunk, in_turn, clock, now
        self._background = background
        self._turns: dict[tuple[Hashable, int | None], Turn[GenerateRequest, GenerateResult]] = {}
        self._tasks: set[asyncio.Task[Sequence[GenerateResult]]] = set()
        self._calls = 0

    async def generate(self, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        """Return the response to one request. Raises what the pool raises for the call that carries it."""
        key = context.prefix, context.home
        turn = self._turns.get(key)
        if turn is None or not turn.open or len(turn.joined) == self._chunk:
            if context.prefix is None:
                context = replace(context, prefix=request.request_id)
            if context.home is None and self._in_turn:
                context = replace(context, home=self._calls)
            turn = self._turns[key] = Turn(partial(self._call, key, self._calls, context))
            self._calls += 1
            self._tasks.add(turn.task)
            turn.task.add_done_callback(self._tasks.discard)
        return await turn.join(request)

    async def cancel(self) -> None:
        """Cancel all open calls and every `generate` that waits for one. Raises as `cancel_all`."""
        await cancel_all(self._tasks, "calls to engines")

    async def _call(
        self, key: tuple[Hashable, int | None], number: int, context: RequestContext, requests: list[GenerateRequest]
    ) -> Sequence[GenerateResult]:
        if (last := self._turns.get(key)) is not None and not last.open:
            del self._turns[key]
        seconds = 0.0
        if self._clock is not None:
            self._clock.enter(number, self._now())
        try:
            results = await self._pool.generate(context, requests, background=self._background)
            seconds = max(result.seconds for result in results)
            return results
        finally:
            if self._clock is not None:
                self._clock.leave(number, self._now(), seconds)
