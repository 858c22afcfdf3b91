"""Batching of requests: those made in one turn of the event loop share one Ray call.

A Ray call costs as much time as 50 short tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass

from megarl.rollout.background import cancel_all
from megarl.rollout.batch_stats import BusyClock
from megarl.rollout.fleet import Fleet
from megarl.rollout.group_deadline import GroupDeadline
from megarl.rollout.requests import GenerateRequest, GenerateResult
from megarl.rollout.response_parts import ResponsePart


@dataclass
class _Waiting:
    request: GenerateRequest
    prefix: Hashable
    home: int | None
    deadline: GroupDeadline | None
    tokens: MutableMapping[str, ResponsePart] | None
    near: int | None
    future: asyncio.Future[GenerateResult]


class Batcher:
    """Takes single requests and sends those that share a turn of the event loop and a prefix in one call."""

    def __init__(
        self,
        pool: Fleet,
        *,
        chunk: int | None = None,
        in_turn: bool = False,
        background: bool = False,
        clock: BusyClock | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chunk`: the most requests in one call (None: no bound). `clock` records when calls are sent and answered.

        `in_turn`: calls without a home go to the replicas in turn instead of by load. `background`: see
        `Fleet.generate`.
        """
        self._pool, self._chunk, self._in_turn, self._clock, self._now = pool, chunk, in_turn, clock, now
        self._background = background
        self._waiting: list[_Waiting] = []
        self._flush: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = 0

    async def generate(
        self,
        request: GenerateRequest,
        prefix: Hashable = None,
        home: int | None = None,
        deadline: GroupDeadline | None = None,
        tokens: MutableMapping[str, ResponsePart] | None = None,
        near: int | None = None,
    ) -> GenerateResult:
        """Return the response to one request. Raises what the pool raised for the call that carried the request.

        `prefix`: requests with the same prefix share a prompt and go to one replica; None shares nothing. `home`: a
        number that alone determines the replica, `near`: one that has the prefix in its cache (see `Router.assign`); of
        requests with the same prefix all have the same. `deadline` and `tokens` (see
        `Fleet.generate`): of the group that the prefix names.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, prefix, home, deadline, tokens, near, loop.create_future())
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
            together.setdefault((each.prefix, each.home), []).append(each)
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
        first = together[0]
        prefix = first.prefix if first.prefix is not None else first.request.request_id
        home = number if first.home is None and self._in_turn else first.home
        seconds = 0.0
        if self._clock is not None:
            self._clock.enter(number, self._now())
        try:
            requests = [each.request for each in together]
            results = await self._pool.generate(
                prefix,
                requests,
                home=home,
                deadline=first.deadline,
                background=self._background,
                tokens=first.tokens,
                near=first.near,
            )
            seconds = max(result.seconds for result in results)
            return results
        finally:
            if self._clock is not None:
                self._clock.leave(number, self._now(), seconds)
