"""The way from the gateway to the rollout controller, whose messages share few Ray calls (`rollout/transport/link.py`).

If the controller dies, the supervisor starts another one under the same name; the client finds it and begins there what
was open, each response from the tokens that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megarl.gateway.request_fields import ApiError, not_generated
from megarl.rollout.engine.response_parts import ResponsePart, join_parts
from megarl.rollout.fleet.external_requests import ExternalDrop, ExternalNews, ExternalRequest, Failure
from megarl.rollout.transport.link import LinkClient, LinkLost, own_text

logger = logging.getLogger(__name__)

RETRY_S = 0.5
MOST_OPEN = 16_384  # responses under way: 2,000 sessions with eight each
# The controller's own message comes first: it knows for whom the request waits.
MARGIN_S = 15.0


class Generation:
    """The response to one request, as far as the gateway knows it. `name`: of the request at the present controller."""

    def __init__(self, request: ExternalRequest, lost_s: Callable[[], float]) -> None:
        """`request`: its deadline is on the clock of this process. `lost_s`: see `ControllerClient.lost_s`."""
        self.request, self.name = request, ""
        self.part = ResponsePart()
        self.replica = -1
        self.failure: Failure = ""
        self.error = ""
        self.until = time.monotonic() + request.timeout_s
        self.news = asyncio.Event()
        self._lost_s = lost_s

    @property
    def ended(self) -> bool:
        """True if the response is complete, or has failed."""
        return self.part.finish_reason is not None or bool(self.failure)

    async def more_than(self, known: float) -> None:
        """Wait until the response has more than `known` tokens, or has ended. Raises ApiError if it takes too long."""
        try:
            async with asyncio.timeout(self.until + MARGIN_S - time.monotonic()):
                while not self.ended and len(self.part.response_ids) <= known:
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            waited_s = self.request.timeout_s + MARGIN_S
            message = f"the gateway waited {waited_s:.0f} s (timeouts.generate_s) for the rollout controller"
            if lost_s := self._lost_s():
                message += f", which it has not reached for {lost_s:.0f} s"
            raise not_generated("late", message) from None

    def result(self) -> ResponsePart:
        """Return the tokens of a response that has ended. Raises ApiError if it failed."""
        if self.failure:
            raise not_generated(self.failure, self.error)
        return self.part


class ControllerClient:
    """Keeps the open requests of the gateway and brings them to the present controller."""

    def __init__(self, gateway: str, find: Callable[[], Awaitable[Any]], rpc_s: float) -> None:
        """`gateway`: a name that no other gateway of the run has had. `find` returns the present controller, or raises.

        `rpc_s`: how long an answer of the controller may be late.
        """
        self._gateway, self._find, self._rpc_s = gateway, find, rpc_s
        self._open: dict[str, Generation] = {}
        self._numbers = itertools.count()
        self._link: LinkClient[ExternalRequest | ExternalDrop] | None = None
        self._lost_at: float | None = time.monotonic()

    @property
    def open_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._open)

    def lost_s(self) -> float:
        """Return for how many seconds the controller has not been reached; 0 while it is."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def open(self, requests: Iterable[ExternalRequest]) -> list[Generation]:
        """Begin requests, whose ids may be any. Raises ApiError if too many are under way."""
        opened = [Generation(each, self.lost_s) for each in requests]
        if len(self._open) + len(opened) > MOST_OPEN:
            message = f"{len(self._open)} responses are under way, and {MOST_OPEN} may be; try again later"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")
        self._add(opened)
        return opened

    def drop(self, generation: Generation) -> None:
        """Stop working on a request; nothing happens if it has ended."""
        if self._open.pop(generation.name, None) is not None and self._link is not None:
            self._link.send(ExternalDrop(generation.name))

    async def run(self) -> None:
        """Bring requests to the controller and receive news until cancelled; find the next one when it is lost.

        Everything that is open is begun there under new names: engines may still work on the requests of before.
        """
        while True:
            controller = await self._connect()
            lost: asyncio.Future[LinkLost] = asyncio.get_running_loop().create_future()
            self._link = LinkClient(
                "the rollout controller", controller, self._rpc_s, self._receive, lost.set_result, int,
                gather_s=0.0, link=uuid.uuid4().hex, who="the gateway",
            )  # fmt: skip
            self._link.send(ExternalDrop(""))  # by which the controller knows the link
            generations = list(self._open.values())
            self._open.clear()
            self._add(generations)
            self._link.open()
            try:
                error = await lost
            finally:
                self._link.close()
                self._link = None
            self._lost_at = self._lost_at or time.monotonic()
            logger.warning("%s; %d requests wait for it, or for another one", error, len(self._open))
            await asyncio.sleep(RETRY_S)

    def _add(self, generations: list[Generation]) -> None:
        """Give requests names that no controller has heard, and send them."""
        for each in generations:
            each.name = f"{self._gateway}/{next(self._numbers)}"
            self._open[each.name] = each
            if self._link is not None:
                self._link.send(self._wanted(each.name))

    async def _connect(self) -> Any:  # noqa: ANN401  # an actor's handle
        """Return the controller."""
        while True:
            try:
                async with asyncio.timeout(self._rpc_s):
                    return await self._find()
            except Exception as error:
                logger.info("the rollout controller is not reached yet: %s", own_text(error) or type(error).__name__)
                await asyncio.sleep(RETRY_S)

    def _wanted(self, name: str) -> ExternalRequest:
        """Return a request as the present controller gets it: from the tokens so far, with the time that is left."""
        generation = self._open[name]
        now, deadline = time.monotonic(), generation.request.deadline
        return replace(
            generation.request,
            request=replace(generation.request.request, request_id=name),
            timeout_s=max(0.0, generation.until - now),
            so_far=generation.part,
            deadline=None if deadline is None else deadline.sent(now),
        )

    async def _receive(self, report: Sequence[ExternalNews]) -> None:
        self._lost_at = None
        for news in report:
            if (generation := self._open.get(news.name)) is None:
                continue
            generation.part = join_parts(generation.part, news.part)
            if news.ended:
                generation.replica, generation.failure, generation.error = news.replica, news.failure, news.error
                del self._open[news.name]
            generation.news.set()
