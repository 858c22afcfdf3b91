"""Gathering of requests: those made in one turn of the event loop share one Ray call.

A Ray call costs as much time as 50 short tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

from megarl.rollout.agents.batch_stats import BusyClock
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.gather import Turn


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
