"""Completes the responses of a call, moving to other replicas if some are lost or drained.

A replica reports a call's tokens at intervals, and when all its responses have ended. Another replica can continue from
the last report.

A publication without partial rollouts waits for running calls. A call is running while a replica works on it, and
between replicas if it has tokens.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from megarl.common.errors import ReplicaFailed, RequestFailed, RolloutError
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.engine.continuation import RequestContext, ResponseCollector
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from megarl.rollout.fleet.replica_table import Lease, ReplicaTable
from megarl.rollout.fleet.router import Router

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallTerms:
    """How the fleet treats a call differently from a training group's call.

    `foreign`: it comes from outside the run and is time-limited there. A long response never counts its replica as
    lost, and no publication waits for it. Cancelling it ends its requests in the engine (training relies on a reset).
    `of_group`: a harness makes it for one of the run's groups, so publications wait for it as for any group call.
    `report_interval_s`: overrides the fleet's.
    """

    foreign: bool = False
    of_group: bool = False
    report_interval_s: float | None = None


GROUP_TERMS = CallTerms()


@dataclass(eq=False)
class Call:
    """A call: its responses so far, and the replica working on them, if any. `background`: for an evaluation."""

    responses: ResponseCollector
    background: bool
    terms: CallTerms
    replica: int | None = None

    @property
    def running(self) -> bool:
        """True if it has begun but not ended, so new weights would give its responses two versions."""
        return bool(self.responses.unfinished) and (self.replica is not None or self.responses.tokens > 0)

    @property
    def outside(self) -> bool:
        """True if its responses may have several versions and exceed the run's time limits."""
        return self.terms.foreign and not self.terms.of_group


class CallRunner:
    """Places calls on serving replicas and follows their reports.

    A replica that dies or reports too late is lost. Another continues its responses from the reported tokens; if none
    is left, they wait for a coming replacement. Refusing a request does not make a replica lost.
    """

    def __init__(self, table: ReplicaTable, router: Router, timeouts: TimeoutsConfig, report_interval_s: float) -> None:
        self._table, self._router, self._timeouts = table, router, timeouts
        self._report_interval_s = report_interval_s
        self._calls: set[Call] = set()
        self._changed = asyncio.Event()  # set when a call has ended, or may have stopped running
        self._stopping: set[asyncio.Task[None]] = set()

    async def run(
        self, context: RequestContext, requests: Sequence[GenerateRequest], background: bool, terms: CallTerms
    ) -> list[GenerateResult]:
        """See `EnginePool.generate`."""
        call = Call(ResponseCollector(requests, context.tokens), background, terms)
        self._calls.add(call)
        try:
            await self._finish(call, context)
            return call.responses.results()
        finally:
            self._calls.discard(call)
            self._changed.set()

    def on(self, replica: int) -> int:
        """Return a replica's number of unfinished responses, including those it is giving up."""
        return sum(len(call.responses.unfinished) for call in self._calls if call.replica == replica)

    async def end(self, timeout_s: float) -> None:
        """Wait until only calls from outside the run are running.

        Raises RolloutError with each replica's number of requests after `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        while running := [call for call in self._calls if call.running and not call.outside]:
            self._changed.clear()
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                left: Counter[str] = Counter()
                for call in running:
                    where = "no replica" if call.replica is None else f"replica {call.replica}"
                    left[where] += len(call.responses.unfinished)
                by_name = ", ".join(f"{name}: {number}" for name, number in sorted(left.items()))
                raise RolloutError(
                    f"a publication waited {timeout_s:.0f} s (timeouts.generate_s) for {left.total()} running requests "
                    f"to end (rollout.partial_rollout: false): {by_name}"
                ) from None

    async def _finish(self, call: Call, context: RequestContext) -> None:
        """Complete every response of a call."""
        responses, deadline = call.responses, context.deadline
        timeout_s = math.inf if call.background or call.terms.foreign else self._timeouts.generate_s
        while responses.unfinished:
            if deadline is not None and time.monotonic() >= deadline.at:
                deadline.settle(responses)
                break
            samples, tokens = len(responses.unfinished), responses.tokens
            lease = await self._router.place(context, samples, tokens, background=call.background, timeout_s=timeout_s)
            if lease is None:
                continue
            call.replica = lease.replica.index
            try:
                await self._serve(context, lease, call, timeout_s)
            except (ReplicaFailed, RequestFailed) as error:
                ended = lease.ended
                if isinstance(error, RequestFailed) and ended is None:
                    raise
                responses.interrupt()
                if ended is None:
                    self._table.lose(lease.replica.index, ReplicaFailed(lease.replica.index, str(error)))
                count, known = len(responses.unfinished), responses.tokens
                logger.warning("%d responses continue elsewhere from %d reported tokens: %s", count, known, error)
            finally:
                call.replica = None
                self._changed.set()

    async def _serve(self, context: RequestContext, lease: Lease, call: Call, timeout_s: float) -> None:
        """Have a replica work on the unfinished responses placed on it until all have ended.

        At the deadline, or when drained, the replica stops the rest, which stay unfinished.

        Raises ReplicaFailed if the replica is lost or replaced, or if a report is `timeouts.rpc_s` late. Raises
        RolloutError if responses are unfinished after `timeout_s`, once the replica has stopped them.
        """
        assert lease.client is not None  # it served when it got the requests
        responses, deadline, replica = call.responses, context.deadline, lease.replica
        until = time.monotonic() + timeout_s
        interval_s = call.terms.report_interval_s or self._report_interval_s
        left = len(responses.unfinished)
        asked: tuple[str, object] = ("generate", responses.send(replica.index))
        replica.work.begin(time.monotonic())
        try:
            while left:
                if (reason := lease.ended) is not None:
                    if not lease.drained:
                        raise reason
                    left -= await self._end(context.prefix, lease, responses)
                    responses.move()
                    return
                left_s = until - time.monotonic()
                if left_s <= 0:
                    left -= await self._end(context.prefix, lease, responses)
                    if left:
                        late = f"after {timeout_s:g} s (timeouts.generate_s) in replica {replica.index}"
                        raise responses.unfinished_at(late)
                    return
                deadline_s = math.inf if deadline is None else max(deadline.at - time.monotonic(), 0.0)
                wait_s = min(interval_s, left_s, deadline_s)
                report = await lease.client.call(*asked, wait_s, timeout_s=wait_s + self._timeouts.rpc_s)
                progress = responses.progress(report[0])
                left -= self._add(context.prefix, lease, report, responses.add)
                self._table.note_progress(lease, progress, time.monotonic(), self._timeouts.rpc_s)
                if left and deadline is not None and time.monotonic() >= deadline.at:
                    left -= await self._end(context.prefix, lease, responses)
                    return
                asked = ("report", responses.reported)
        except asyncio.CancelledError:
            if call.terms.foreign and lease.same_actor:
                self._stop(lease, responses.reported)
            raise
        finally:
            replica.work.end(time.monotonic())
            self._router.release(context.prefix, lease, left)

    def _add(
        self, prefix: Hashable, lease: Lease, report: EngineReport, add: Callable[[Mapping[str, ResponsePart]], int]
    ) -> int:
        """Add a report's tokens; return how many responses they ended."""
        parts, load = report
        lease.replica.work.note(sum(len(part.response_ids) for part in parts.values()), time.monotonic())
        ended = add(parts)
        self._router.reported(prefix, lease, ended, load)
        return ended

    async def _end(self, prefix: Hashable, lease: Lease, responses: ResponseCollector) -> int:
        """Have a replica stop its unfinished responses; add their last tokens; return how many ended."""
        assert lease.client is not None
        report = await lease.client.call("end", responses.reported, timeout_s=self._timeouts.rpc_s)
        return self._add(prefix, lease, report, responses.add_last)

    def _stop(self, lease: Lease, reported: dict[str, int]) -> None:
        """Have a replica stop requests nobody awaits, without waiting for it."""

        async def stop() -> None:
            assert lease.client is not None
            try:
                await lease.client.call("end", reported, timeout_s=self._timeouts.rpc_s)
            except RolloutError as error:
                logger.info("requests were not stopped: %s", error)  # the replica died, or had dropped them

        stopping = asyncio.ensure_future(stop())
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
