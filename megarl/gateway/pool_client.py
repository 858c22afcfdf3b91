"""The way from the gateway to the rollout controller: requests that share a turn of the event loop share one Ray call.

One further call waits for news of all open requests. If the controller dies, the supervisor starts another one under
the same name; the link finds it and begins there what was open, each response from the tokens that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megarl.gateway.request_fields import ApiError, SamplingChoice, not_generated
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, request_seed
from megarl.rollout.engine.response_parts import ResponsePart, join_parts
from megarl.rollout.fleet.external_requests import ExternalReport, ExternalRequest, Failure

logger = logging.getLogger(__name__)

POLL_S = 10.0  # the longest time that the controller lets the gateway wait for news
RETRY_S = 0.5


class Controller(Protocol):
    """The methods of the controller's actor that the gateway calls; each has `remote`, which returns an awaitable."""

    begin_external: Any
    drop_external: Any
    take_external: Any


class Generation:
    """The response to one request, as far as the gateway knows it."""

    def __init__(self, request: ExternalRequest) -> None:
        """`request`: its deadline is on the clock of this process."""
        self.request = request
        self.part = ResponsePart()
        self.replica = -1
        self.failure: Failure = ""
        self.error = ""
        self.until = time.monotonic() + request.timeout_s
        self._news: asyncio.Event = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True if the response is complete, or has failed."""
        return self.part.finish_reason is not None or bool(self.failure)

    async def more_than(self, known: int) -> None:
        """Wait until the response has more than `known` tokens, or has ended."""
        while not self.ended and len(self.part.response_ids) <= known:
            self._news.clear()
            await self._news.wait()

    async def end(self) -> None:
        """Wait until the response has ended."""
        while not self.ended:
            self._news.clear()
            await self._news.wait()

    def tell(self) -> None:
        """Let those that wait look again."""
        self._news.set()


class ControllerClient:
    """Keeps the open requests of the gateway and the connection to the present controller."""

    def __init__(self, gateway: str, find: Callable[[], Awaitable[Controller]], rpc_s: float) -> None:
        """`gateway`: a name that no other gateway of the run has had. `find` returns the present controller, or raises.

        `rpc_s`: how long an answer of the controller may be late.
        """
        self._gateway, self._find, self._rpc_s = gateway, find, rpc_s
        self._controller: Controller | None = None
        self._open: dict[str, Generation] = {}  # by the name of the request at the present controller
        self._names: dict[Generation, str] = {}
        self._numbers = itertools.count()
        self._fresh: list[Generation] = []
        self._dropped: list[str] = []
        self._flush: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost_at: float | None = time.monotonic()

    @property
    def open_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._open)

    def lost_s(self, now: float) -> float:
        """Return for how many seconds the controller has not been reached; 0 while it is."""
        return 0.0 if self._lost_at is None else now - self._lost_at

    def open(self, request: ExternalRequest) -> Generation:
        """Begin a request. Its id may be any; the link gives it one that is unique."""
        generation = Generation(request)
        self._add(generation)
        self._fresh.append(generation)
        self._flush_soon()
        return generation

    def drop(self, generation: Generation) -> None:
        """Stop working on a request; nothing happens if it has ended."""
        if (name := self._names.pop(generation, None)) is not None:
            del self._open[name]
            self._dropped.append(name)
            self._flush_soon()

    async def run(self) -> None:
        """Receive news until cancelled; find the controller at the beginning and whenever it has died."""
        seen = 0
        while True:
            if self._controller is None:
                seen = 0
                await self._connect()
            controller = self._controller
            try:
                async with asyncio.timeout(POLL_S + self._rpc_s):
                    report = await controller.take_external.remote(self._gateway, seen, POLL_S)  # type: ignore[union-attr]
            except Exception as error:
                await self._failed(error)
                continue
            self._lost_at = None
            if report.number != seen:
                seen = report.number
                self._receive(report)

    def close(self) -> None:
        """Cancel the calls that are under way."""
        for task in self._tasks:
            task.cancel()

    def _add(self, generation: Generation) -> None:
        name = f"{self._gateway}/{next(self._numbers)}"
        self._open[name] = generation
        self._names[generation] = name

    def _flush_soon(self) -> None:
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send what came in this turn of the event loop; without a controller `_connect` will."""
        self._flush = None
        fresh, self._fresh = self._fresh, []
        dropped, self._dropped = self._dropped, []
        controller = self._controller
        if controller is None:
            return
        if names := [name for each in fresh if (name := self._names.get(each)) is not None]:
            self._start(self._begin(controller, names))
        if dropped:
            self._start(_quietly(controller.drop_external.remote(self._gateway, dropped)))

    def _start(self, coroutine: Any) -> None:  # noqa: ANN401  # a coroutine of any kind
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, controller: Controller, names: list[str]) -> None:
        """Begin requests at a controller; again if the call may not have arrived, until another controller is found."""
        while self._controller is controller:
            wanted = [self._wanted(name) for name in names if name in self._open]
            if not wanted:
                return
            try:
                async with asyncio.timeout(self._rpc_s):
                    await controller.begin_external.remote(self._gateway, wanted)
                return
            except Exception as error:
                logger.warning("%d requests are sent to the controller again: %s", len(wanted), _line(error))
                await asyncio.sleep(RETRY_S)

    def _wanted(self, name: str) -> ExternalRequest:
        """Return a request as the present controller gets it: from the tokens so far, with the time that is left."""
        generation = self._open[name]
        request = replace(generation.request.request, request_id=name)
        now, deadline = time.monotonic(), generation.request.deadline
        return replace(
            generation.request,
            request=request,
            timeout_s=max(0.0, generation.until - now),
            so_far=generation.part,
            deadline=None if deadline is None else deadline.sent(now),
        )

    async def _connect(self) -> None:
        """Find the controller, and begin everything that is open there under new names.

        The engines may still work on the requests of a controller that has died.
        """
        while True:
            try:
                async with asyncio.timeout(self._rpc_s):
                    controller = await self._find()
                generations = list(self._open.values())
                self._open.clear()
                self._names.clear()
                for each in generations:
                    self._add(each)
                async with asyncio.timeout(self._rpc_s):
                    wanted = [self._wanted(name) for name in self._open]
                    await controller.begin_external.remote(self._gateway, wanted)
            except Exception as error:
                logger.info("the rollout controller is not reached yet: %s", _line(error))
                await asyncio.sleep(RETRY_S)
                continue
            self._controller, self._lost_at = controller, None
            # Those that came during the call: they are open, and the call did not have them.
            sent = {each.request.request_id for each in wanted}
            if late := [name for name in self._open if name not in sent]:
                self._start(self._begin(controller, late))
            # And those that nobody waits for any more.
            if gone := [name for name in sent if name not in self._open]:
                self._start(_quietly(controller.drop_external.remote(self._gateway, gone)))
            return

    async def _failed(self, error: Exception) -> None:
        """Look for another controller if this one has died; ask it again otherwise."""
        self._lost_at = self._lost_at or time.monotonic()
        if "ActorDied" in type(error).__name__:
            logger.warning("the rollout controller has died: %d requests wait for another one", len(self._open))
            self._controller = None
        else:
            logger.warning("the rollout controller does not answer and is asked again: %s", _line(error))
        await asyncio.sleep(RETRY_S)

    def _receive(self, report: ExternalReport) -> None:
        for name, news in report.news.items():
            if (generation := self._open.get(name)) is None:
                continue
            generation.part = join_parts(generation.part, news.part)
            if news.ended:
                generation.replica, generation.failure, generation.error = news.replica, news.failure, news.error
                del self._open[name], self._names[generation]
            generation.tell()


async def _quietly(call: Awaitable[object]) -> None:
    try:
        await call
    except Exception as error:
        logger.info("requests were not dropped: %s", _line(error))  # a later controller does not know them


def _line(error: BaseException) -> str:
    """Return what an actor raised in one line."""
    text = str(getattr(error, "cause", None) or error).strip().splitlines()
    return text[-1] if text else type(error).__name__


# Opens the responses to a request at the controller, and waits for their ends.

MOST_OPEN = 16_384  # responses under way: 2,000 sessions with eight each
# The controller's own message comes first: it knows for whom the request waits.
MARGIN_S = 15.0


@dataclass(frozen=True)
class SessionPlace:
    """Holds where a request belongs; see `ExternalRequest`. The deadline is on the clock of this process."""

    prefix: str
    replica: int | None = None
    of_group: bool = False
    deadline: GroupDeadline | None = None


class Generations:
    """Opens responses; each is waited for `timeout_s` at most."""

    def __init__(self, link: ControllerClient, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s

    @asynccontextmanager
    async def open(
        self, prompt_ids: list[int], sampling: SamplingChoice, place: SessionPlace, *, interval_s: float | None = None
    ) -> AsyncIterator[list[Generation]]:
        """Give the responses to a prompt, which are under way; those that are still at the end are dropped.

        `interval_s`: see `ExternalRequest`. Raises ApiError if there are too many, and if the
        block lasts longer than a response may take.
        """
        if self._link.open_requests + sampling.n > MOST_OPEN:
            told = f"{self._link.open_requests} responses are under way, and {MOST_OPEN} may be; try again later"
            raise ApiError(429, told, kind="rate_limit_error", code="rate_limit_exceeded")
        opened = [
            self._link.open(
                ExternalRequest(
                    GenerateRequest("", prompt_ids, sampling.spec, _seed(sampling.seed, index)),
                    place.prefix, self._timeout_s, place.replica, interval_s, of_group=place.of_group,
                    deadline=place.deadline,
                )
            )
            for index in range(sampling.n)
        ]  # fmt: skip
        try:
            async with asyncio.timeout(self._timeout_s + MARGIN_S) as limit:
                yield opened
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._unreachable() from None
        finally:
            for each in opened:
                self._link.drop(each)

    def _unreachable(self) -> ApiError:
        lost_s = self._link.lost_s(time.monotonic())
        told = f"the gateway waited {self._timeout_s + MARGIN_S:.0f} s (gateway.request_timeout_s) for the rollout controller"  # noqa: E501
        if lost_s:
            told += f", which it has not reached for {lost_s:.0f} s"
        return not_generated("late", told)


async def ends_of(generations: Sequence[Generation]) -> list[ResponsePart]:
    """Wait until responses have ended; return them. Raises ApiError for the first that failed."""
    for each in generations:
        await each.end()
    return [checked(each) for each in generations]


def checked(generation: Generation) -> ResponsePart:
    """Return the tokens of a response. Raises ApiError if it failed."""
    if generation.failure:
        raise not_generated(generation.failure, generation.error)
    return generation.part


def _seed(seed: int | None, index: int) -> int | None:
    """Return the seed of a response: that of the request for the first one, different ones for the others."""
    return seed if seed is None or index == 0 else request_seed(seed, 0, index)
