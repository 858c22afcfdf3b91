"""Brings the responses of a call to their end, on one replica after the other if some are lost or drained.

A replica reports the tokens of a call when all its responses have ended, and else at intervals, so that another one can
continue them from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from megarl.common.errors import ReplicaFailed, RequestFailed
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.engine.continuation import GroupDeadline, ResponsesSoFar
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.engine.response_parts import EngineReport
from megarl.rollout.fleet.drain import Call, RunningCalls
from megarl.rollout.fleet.replacements import Replacements
from megarl.rollout.fleet.replica_actors import ReplicaActors
from megarl.rollout.fleet.replica_states import Lease, ReplicaStates
from megarl.rollout.fleet.router import Dispatcher
from megarl.rollout.fleet.speed import ReplicaWork

logger = logging.getLogger(__name__)

_REPLACED = -1  # stands for the index of a replica that was lost or replaced meanwhile


@dataclass(frozen=True)
class CallTerms:
    """Holds how the fleet treats a call, where that differs from a call for a training group.

    `foreign`: it comes from outside the run, where somebody bounds its time: no replica is lost because a response
    takes long, no publication waits for its end, and a cancelled call ends its requests in the engine, which for
    training a reset does. `of_group`: a harness makes it for one of the run's groups, so publications wait for its end
    as for that of any call for a group. `report_interval_s`: instead of the fleet's own.
    """

    foreign: bool = False
    of_group: bool = False
    report_interval_s: float | None = None


GROUP_TERMS = CallTerms()


class CallRunner:
    """Places calls on replicas that serve and follows their reports. `work`: how fast each replica works.

    A replica that dies or does not report in time is lost, and another one continues its responses from the tokens that
    it has reported. If none is left, they wait for a replacement that is coming. A request that an engine refuses says
    nothing about the engine.
    """

    def __init__(
        self,
        actors: ReplicaActors,
        states: ReplicaStates,
        replacements: Replacements,
        dispatcher: Dispatcher,
        calls: RunningCalls,
        timeouts: TimeoutsConfig,
        report_interval_s: float,
    ) -> None:
        """`calls`: those that are run, which learn when a replica has left one."""
        self._actors, self._states, self._replacements = actors, states, replacements
        self._dispatcher, self._calls, self._timeouts = dispatcher, calls, timeouts
        self._report_interval_s = report_interval_s
        self.work = ReplicaWork()
        self._stopping: set[asyncio.Future[EngineReport]] = set()

    async def run(self, call: Call, context: RequestContext, terms: CallTerms) -> None:
        """Bring every response of a call to its end. Arguments and errors are those of `EnginePool.generate`."""
        responses, background, deadline = call.responses, call.background, context.deadline
        timeout_s = math.inf if background or terms.foreign else self._timeouts.generate_s
        while responses.unfinished:
            if deadline is not None and time.monotonic() >= deadline.at:
                deadline.settle(responses)
                break
            await self._await_replica(responses, deadline)
            index = await self._dispatcher.place(
                context,
                len(responses.unfinished),
                begun=responses.tokens > 0,
                background=background,
                timeout_s=timeout_s,
            )
            if index is None:
                continue  # to the deadline, or to the wait for a replica
            service = self._states.service(index)
            try:
                with call.served_by(index):
                    await self._serve(context, service, responses, timeout_s, terms)
            except (ReplicaFailed, RequestFailed) as error:
                ended = self._states.ended(service)
                if isinstance(error, RequestFailed) and ended is None:
                    raise
                responses.interrupt()
                if ended is None:
                    self._states.lose(index, ReplicaFailed(index, str(error)))
                self._calls.changed()
                count, known = len(responses.unfinished), responses.tokens
                logger.warning("%d responses go on elsewhere from %d reported tokens: %s", count, known, error)

    async def _await_replica(self, responses: ResponsesSoFar, deadline: GroupDeadline | None) -> None:
        """Wait until a replica serves such requests, or to the deadline.

        Raises NoReplicaLeft, with the reason of the last loss, as soon as no replica is coming, and if none has come
        within the time that all attempts at a weight sync can take.
        """
        if self._dispatcher.load:
            return
        limit_s = self._replacements.timeout_s
        until = time.monotonic() + limit_s
        wake = until if deadline is None else min(until, deadline.at)
        if self._replacements.coming:
            count, tokens = len(responses.unfinished), responses.tokens
            logger.warning("no replica serves: %d responses with %d tokens wait for a new one", count, tokens)
        while not self._dispatcher.load:
            if not self._replacements.coming:
                raise self._states.none_left("")
            if time.monotonic() >= wake:
                if wake < until:
                    return
                waited = f"{limit_s:.0f} s (timeouts.weight_sync_s and engine_start_s)"
                raise self._states.none_left(
                    f"{len(responses.unfinished)} responses waited {waited} for a new replica after: "
                )
            await self._replacements.wait(wake)

    async def _serve(
        self,
        context: RequestContext,
        service: Lease,
        responses: ResponsesSoFar,
        timeout_s: float,
        terms: CallTerms,
    ) -> None:
        """Have a replica work on the unfinished responses, which are placed on it, until all have ended.

        At the deadline, or when it is drained, the replica stops the others, which stay unfinished.

        Raises ReplicaFailed if the replica is lost or replaced, or if a report does not come within `timeouts.rpc_s` of
        the time when it is due; RolloutError if responses are unfinished after `timeout_s`, which a replica that works
        stops.
        """
        index, states = service.index, self._states
        prefix, deadline = context.prefix, context.deadline
        until = time.monotonic() + timeout_s
        interval_s = terms.report_interval_s or self._report_interval_s
        left = len(responses.unfinished)
        call: tuple[str, object] = ("generate", responses.send(index))

        def holder() -> int:
            return index if states.ended(service) is None else _REPLACED

        self.work.begin(index, time.monotonic())
        try:
            while left:
                if (reason := states.ended(service)) is not None:
                    if not (states.is_drained(index) and states.is_same(service)):
                        raise reason
                    left -= await self._end(prefix, index, responses, holder)
                    responses.move()
                    return
                left_s = until - time.monotonic()
                if left_s <= 0:
                    left -= await self._end(prefix, index, responses, holder)
                    if left:
                        raise responses.unfinished_at(f"after {timeout_s:g} s (timeouts.generate_s) in replica {index}")
                    return
                deadline_s = math.inf if deadline is None else max(deadline.at - time.monotonic(), 0.0)
                wait_s = min(interval_s, left_s, deadline_s)
                report = await self._actors.call(index, *call, wait_s, timeout_s=wait_s + self._timeouts.rpc_s)
                self.work.note(index, report.tokens, time.monotonic())
                states.note_progress(service, responses.progress(report.parts))
                ended = responses.add(report.parts)
                self._dispatcher.reported(prefix, holder(), ended, report.load)
                left -= ended
                if left and deadline is not None and time.monotonic() >= deadline.at:
                    left -= await self._end(prefix, index, responses, holder)
                    return
                call = ("report", responses.reported)
        except asyncio.CancelledError:
            if terms.foreign:
                self._stop(service, responses.reported)
            raise
        finally:
            self.work.end(index, time.monotonic())
            self._dispatcher.release(prefix, holder(), left)

    async def _end(self, prefix: Hashable, index: int, responses: ResponsesSoFar, holder: Callable[[], int]) -> int:
        """Have a replica stop its unfinished responses; add their last tokens. Return how many ended with them."""
        report = await self._actors.call(index, "end", responses.reported, timeout_s=self._timeouts.rpc_s)
        self.work.note(index, report.tokens, time.monotonic())
        ended = responses.add_last(report.parts)
        self._dispatcher.reported(prefix, holder(), ended, report.load)
        return ended

    def _stop(self, service: Lease, reported: dict[str, int]) -> None:
        """Have a replica stop requests that nobody waits for any more, and do not wait for that either."""
        if not self._states.is_same(service):
            return
        stopping = asyncio.ensure_future(self._actors.link(service.index).call("end", reported))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopped)

    def _stopped(self, stopping: asyncio.Future[EngineReport]) -> None:
        self._stopping.discard(stopping)
        if not stopping.cancelled() and (error := stopping.exception()) is not None:
            logger.info("requests were not stopped: %s", error)  # the replica has died, or dropped them before
