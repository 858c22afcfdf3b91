"""The replicas of a run: responses of those that serve, publications to all of them, and how lost ones are replaced.

The config gives the number of replicas at the start. After that only the fleet knows how many there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.common.errors import NoPlace, ReplicaFailed, RolloutError
from megarl.common.process.held_outputs import hold_within
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.placement import HeldDevices
from megarl.rollout.fleet.calls import GROUP_TERMS, CallRunner, CallTerms
from megarl.rollout.fleet.replica_table import Replica, ReplicaTable
from megarl.rollout.fleet.router import PublicationHold, Router
from megarl.rollout.fleet.speed import rate_metrics
from megarl.rollout.transport.rpc import ReplicaClient, as_rollout_error

if TYPE_CHECKING:
    from ray.actor import ActorHandle


import time
from collections.abc import Hashable
from dataclasses import replace
from functools import partial

from megarl.rollout.agents.batch_stats import BusyClock
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.gather import Turn

logger = logging.getLogger(__name__)

# A lost replica that does not answer within this time does not answer the weight sync either.
_RETIRE_S = 2.0
_RESET_S = 5.0  # in which a lost replica that is sound drops its requests

# Ends an actor and starts a new one of the same index; raises ReplicaFailed if it does not come up.
Restart = Callable[[int, "ActorHandle"], Awaitable["ActorHandle"]]


class EnginePool:
    """Holds all replicas: those that serve, those that are lost, and those that join at the next version.

    Requests of one call go to one replica; another one continues its responses if that one is lost (`calls.py`).
    A lost replica that turns out to be sound serves again after the next weight sync.

    `table`: what each replica does; the changes of the pool act on it.
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
    ) -> None:
        """`replicas`: started EngineReplica actors by index. `describe(index)`: where a replica's log is.

        `report_interval_s`: of how many seconds a lost replica may take the tokens with it. `sync_restarts`: how often
        a failed sync is repeated with new replicas (`weight_sync.restarts`).
        """
        self._timeouts, self._restart, self._describe = timeouts, restart, describe
        # What an engine holds is missing from a report, so the next one comes earlier by as much.
        self._report_interval_s = report_interval_s - hold_within(report_interval_s)
        clients = {index: self.client(index, actor) for index, actor in replicas.items()}
        self.table = ReplicaTable(clients, replaces=sync_restarts > 0)
        replacement_s = all_attempts_s(timeouts, sync_restarts)
        # For as long as running responses may take to end, and then a weight sync with all its attempts.
        self._hold = PublicationHold(timeouts.generate_s + replacement_s)
        self._router = Router(self.table, self._hold, replacement_s)
        self._calls = CallRunner(self.table, self._router, timeouts, self._report_interval_s)

    def client(self, index: int, actor: ActorHandle) -> ReplicaClient:
        """Return what calls the actor of a replica."""
        return ReplicaClient(index, actor, self._timeouts.rpc_s, self._describe(index))

    async def call(self, index: int, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call a method of a replica; see `ReplicaClient.call`. Raises ReplicaFailed too if it has left the pool."""
        client = self.table[index].client if index in self.table else None
        if client is None:
            raise ReplicaFailed(index, f"replica {index} has left the pool")
        return await client.call(method, *args, timeout_s=timeout_s)

    @property
    def members(self) -> list[int]:
        """Indices of the replicas that take part in the publication that is being made, or else in the next one."""
        return [each.index for each in self.table.members]

    @property
    def serving(self) -> list[int]:
        """Indices of the replicas that serve, sorted."""
        return [each.index for each in self.table.serving]

    @property
    def idle(self) -> list[int]:
        """Indices of the replicas that are started, wait for their first weights, or are drained, sorted."""
        return [each.index for each in self.table.idle]

    @property
    def lost(self) -> dict[int, ReplicaFailed]:
        """The replicas that do not serve because they failed, with the reasons; the last one lost is at the end."""
        return self.table.lost

    @property
    def needs_publication(self) -> str:
        """The reason why the trainer must publish its weights now, because only that brings a replica; else empty."""
        if self.table.serving or self.table.under_way or not (lost := self.lost):
            return ""
        return str(next(reversed(lost.values())))

    def expect_publication(self, publishes: bool) -> None:
        """Record whether a trainer publishes as soon as it hears that it must (`needs_publication`).

        Responses whose last replica is lost then wait for that, instead of ending the run.
        """
        self.table.expects = publishes
        self._router.look_again()

    def take_load(self) -> EngineLoad:
        """Return the peaks of all replicas since the last call, as far as they have reported."""
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

        `terms`: what is different for calls that are not for training groups. `background`: they belong to an
        evaluation alongside training, and give way to training. They have no time limit of their own: the wait for the
        evaluation has one.

        Raises RequestFailed if an engine refused them, NoReplicaLeft if the last replica for them was lost and no other
        one is coming, RolloutError if the group fails by its deadline, if no replica has room within
        `timeouts.generate_s`, or if one that works has not ended them within that time.
        """
        return await self._calls.run(context, requests, background, terms)

    @property
    def report_bound_s(self) -> float:
        """The longest time until a replica has reported, or is lost."""
        return self._report_interval_s + 2 * self._timeouts.rpc_s

    def outstanding(self, index: int) -> int:
        """Return the number of responses on which a replica works, those that a drained one gives up included."""
        return self._calls.on(index)

    def can_end(self, replica: Replica) -> bool:
        """Return whether the engine of a replica that leaves can end: nothing works on it, with it or for it."""
        return not (self._calls.on(replica.index) or replica.published or replica.coming)

    async def begin_sync(self) -> None:
        """Record that a weight sync is about to begin, which replaces the replicas that its failure leaves unusable.

        A lost replica may be sound: its report was late, or the network was cut. If it can drop its requests, it serves
        again after the sync. Else it is asked to refuse the sync, so that it is replaced, unless a failed sync ends the
        run (`weight_sync.restarts` is 0): it then takes part, and serves no more.
        """
        self.table.begin_sync()
        lost = [each for each in self.table if each.lost and not each.coming]
        await asyncio.gather(*(self._readmit(each, self.table.sync_replaces) for each in lost))

    async def _drop_requests(self, replica: Replica, timeout_s: float) -> ReplicaFailed | None:
        """Make an engine drop its requests; one that was lost joins then. Return why it could not."""
        try:
            await self.call(replica.index, "reset", timeout_s=timeout_s)
        except RolloutError as error:
            return ReplicaFailed(replica.index, str(error))
        self.table.join(replica.index)
        return None

    async def _readmit(self, replica: Replica, replaces: bool) -> None:
        """Let a lost replica join if it is sound; else, if the sync `replaces` those that refuse it, have it refuse."""
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
            logger.info("replica %d, which is lost, was not notified: %s", index, failure)

    async def drain(self, timeout_s: float) -> None:
        """Hold back all requests that have not begun, and wait until those that have begun have ended.

        They are held back until `admit_joining` or `reset`, and not after a failure. Foreign ones that have begun are
        not waited for. Raises RolloutError naming the replicas and their numbers of requests after `timeout_s`.
        """
        self._hold.begin()
        try:
            await self._calls.end(timeout_s)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Place what `drain` has held back."""
        self._hold.end()
        self._router.look_again()

    async def may_begin(self) -> None:
        """Wait until requests are not held back by `drain`. Raises RolloutError if that takes too long."""
        await self._hold.wait("a prompt group")

    def admit_joining(self) -> None:
        """Let all replicas serve training, replaced and new ones too. Call it when a sync is complete.

        Drained ones do not.
        """
        self.table.admit()
        self._let_go()

    async def restart(self, indices: Sequence[int]) -> None:
        """Replace replicas by new ones under the same names; they serve after `admit_joining`, and not before.

        One for which no node has room, as after the loss of its node, leaves the pool, unless it would be the last.
        Raises RolloutError if one does not come up. The controller owns them: the actors of a rank would end with the
        rank.
        """
        self.table.excuse_leaving()
        wanted = [each for index in indices if index in self.table and not (each := self.table[index]).leaving]
        ends = await asyncio.gather(*(self._restart_one(each) for each in wanted), return_exceptions=True)
        failures = {each.index: end for each, end in zip(wanted, ends, strict=True) if end is not None}
        left = [each for each in self.table.members if not each.drained and each.index not in failures]
        for error in failures.values():
            if not (isinstance(error, NoPlace) and left):
                raise error
        for index, error in failures.items():
            logger.warning("the pool goes on without replica %d: %s", index, error)
            self.table.give_up(index)

    async def _restart_one(self, replica: Replica) -> None:
        assert replica.client is not None  # a publication is not made to one whose engine is being started
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
        """Make every engine drop its requests and be ready to serve; replace those that cannot, or are too slow.

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
        """Make every engine drop the requests of a controller that has died. Those that cannot are lost.

        They serve again, or are replaced, after the next sync. `in_sync`: the trainer is in the middle of one.
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
    """Return the seconds that all attempts at a weight sync can take, with a restart between two of them."""
    return (sync_restarts + 1) * timeouts.weight_sync_s + sync_restarts * timeouts.engine_start_s


# Gathering of requests: those made in one turn of the event loop share one Ray call.
#
# A Ray call costs as much time as 50 short tokens.


class RequestCoalescer:
    """Takes single requests and sends those that share a turn of the event loop and a prefix in one call."""

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
        """`chunk`: the most requests in one call (None: no bound). `clock` records when calls are sent and answered.

        `in_turn`: calls without a home go to the replicas in turn instead of by load. `background`: see
        `EnginePool.generate`.
        """
        self._pool, self._chunk, self._in_turn, self._clock, self._now = pool, chunk, in_turn, clock, now
        self._background = background
        self._turns: dict[tuple[Hashable, int | None], Turn[GenerateRequest, GenerateResult]] = {}
        self._tasks: set[asyncio.Task[Sequence[GenerateResult]]] = set()
        self._calls = 0

    async def generate(self, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        """Return the response to one request. Raises what the pool raised for the call that carried the request."""
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
        """Cancel every open call, and every `generate` that waits for one. Raises as `cancel_all`."""
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
