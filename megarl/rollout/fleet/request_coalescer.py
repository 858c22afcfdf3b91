"""Batching of requests: those made in one turn of the event loop share one Ray call.

A Ray call costs as much time as 50 short tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from megarl.rollout.agents.batch_stats import BusyClock
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.transport.background import cancel_all


@dataclass
class _Waiting:
    request: GenerateRequest
    context: RequestContext
    future: asyncio.Future[GenerateResult]


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
        self._waiting: list[_Waiting] = []
        self._flush: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0

    async def generate(self, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        """Return the response to one request. Raises what the pool raised for the call that carried the request."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, context, loop.create_future())
        self._waiting.append(waiting)
        if self._flush is None:
            self._flush = loop.call_soon(self._send)
        return await waiting.future

    async def cancel(self) -> None:
        """Cancel every open call, and every `generate` that waits for one. Raises as `cancel_all`."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.future.cancel()
        await cancel_all(self._tasks, "calls to engines")

    def _send(self) -> None:
        waiting, self._waiting, self._flush = self._waiting, [], None
        together: dict[tuple[Hashable, int | None], list[_Waiting]] = {}
        for each in waiting:
            together.setdefault((each.context.prefix, each.context.home), []).append(each)
        for same in together.values():
            size = self._chunk or len(same)
            for start in range(0, len(same), size):
                call = self._call(self._calls, same[start : start + size])
                self._calls += 1
                task = asyncio.get_running_loop().create_task(call)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _call(self, number: int, together: list[_Waiting]) -> None:
        try:
            results = await self._timed(number, together)
        except Exception as error:
            for each in together:
                if not each.future.done():
                    each.future.set_exception(error)
        except asyncio.CancelledError:
            for each in together:
                each.future.cancel()
            raise
        else:
            for each, result in zip(together, results, strict=True):
                if not each.future.done():
                    each.future.set_result(result)

    async def _timed(self, number: int, together: list[_Waiting]) -> list[GenerateResult]:
        context = together[0].context
        if context.prefix is None:
            context = replace(context, prefix=together[0].request.request_id)
        if context.home is None and self._in_turn:
            context = replace(context, home=number)
        seconds = 0.0
        if self._clock is not None:
            self._clock.enter(number, self._now())
        try:
            requests = [each.request for each in together]
            results = await self._pool.generate(context, requests, background=self._background)
            seconds = max(result.seconds for result in results)
            return results
        finally:
            if self._clock is not None:
                self._clock.leave(number, self._now(), seconds)
