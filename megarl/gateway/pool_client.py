"""The gateway's client of the rollout controller; messages share few Ray calls (`rollout/transport/link.py`).

If the controller dies, the supervisor starts another one under the same name. The client finds it and restarts the open
requests there, each from its tokens so far.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megarl.gateway.request_fields import not_generated, too_many
from megarl.rollout.engine.response_parts import ResponsePart, join_parts
from megarl.rollout.fleet.external_requests import ExternalDrop, ExternalNews, ExternalRequest, Failure
from megarl.rollout.transport.link import LinkClient, LinkLost, own_text

logger = logging.getLogger(__name__)

RETRY_S = 0.5
MOST_OPEN = 16_384  # running responses: 2,000 sessions with eight each
# So that the controller's timeout comes first: it knows what the request waits for.
MARGIN_S = 15.0


class Generation:
    """The response to one request, as far as the gateway knows it. `name`: the request's at the current controller."""

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
        """True if the response is complete or has failed."""
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
        """Return the tokens of an ended response. Raises ApiError if it failed."""
        if self.failure:
            raise not_generated(self.failure, self.error)
        return self.part


class ControllerClient:
    """Keeps the gateway's open requests and sends them to the current controller."""

    def __init__(self, gateway: str, find: Callable[[], Awaitable[Any]], rpc_s: float) -> None:
        """`gateway`: a unique name among the run's gateways. `find` returns the current controller, or raises.

        `rpc_s`: how late an answer of the controller may be.
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
        """Return how many seconds the controller has been unreachable; 0 while it is reached."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def open(self, requests: Iterable[ExternalRequest]) -> list[Generation]:
        """Start requests; their ids are replaced. Raises ApiError if too many are running."""
        opened = [Generation(each, self.lost_s) for each in requests]
        if len(self._open) + len(opened) > MOST_OPEN:
            raise too_many(f"{len(self._open)} responses are under way, and {MOST_OPEN} may be; try again later")
        self._add(opened)
        return opened

    def drop(self, generation: Generation) -> None:
        """Stop working on a request, unless it has ended."""
        if self._open.pop(generation.name, None) is not None and self._link is not None:
            self._link.send(ExternalDrop(generation.name))

    async def run(self) -> None:
        """Send requests to the controller and receive news until cancelled; find the next controller after a loss.

        Open requests restart there under new names: engines may still work on the old ones.
        """
        while True:
            controller = await self._connect()
            lost: asyncio.Future[LinkLost] = asyncio.get_running_loop().create_future()
            self._link = LinkClient(
                "the rollout controller", controller, self._rpc_s, self._receive, lost.set_result, int,
                gather_s=0.0, link=uuid.uuid4().hex, who="the gateway",
            )  # fmt: skip
            self._link.send(ExternalDrop(""))  # introduces the link to the controller
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
        """Give requests new names, and send them."""
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
                logger.info("cannot reach the rollout controller yet: %s", own_text(error) or type(error).__name__)
                await asyncio.sleep(RETRY_S)

    def _wanted(self, name: str) -> ExternalRequest:
        """Return a request for the current controller, with its tokens so far and its remaining time."""
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
