"""Requests from outside the run, which the gateway passes on to the controller: begun, watched, dropped.

They go through the fleet like those of training groups, so they wait out a publication and go on elsewhere when a
replica is lost; admission knows nothing of them. Some are of the run's own groups, whose samples a harness acts for:
these have the group's deadline, and a publication that lets responses end waits for them.

The gateway begins many in one call. One call of the gateway waits for news of all of them: a call per response would
cost more than a short response. News are repeated until the gateway has asked for the next ones, so an answer that is
lost on its way loses no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megarl.common.errors import RequestFailed, RolloutError, clear_text
from megarl.rollout.engine.continuation import GroupDeadline, RequestContext
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.response_parts import ResponsePart, tokens_from
from megarl.rollout.fleet.calls import CallTerms
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.gather import Replay

logger = logging.getLogger(__name__)

# How a request failed: the engine refused it, its time was over, or the pool could not serve it.
Failure = Literal["", "refused", "late", "unavailable"]


@dataclass(frozen=True)
class ExternalRequest:
    """A request of the gateway. `timeout_s` counts from its arrival at the controller.

    `prefix`: requests with the same one share the beginning of their prompts; `replica` has it in its KV cache, if that
    is known. `interval_s`: the time between two news of its tokens; None: that of training's responses. `so_far`: the
    tokens that it has from a controller that has died. `of_group`: it is made for a group of the run; `deadline`: that
    of the group, if it has one, as `GroupDeadline.sent`.
    """

    request: GenerateRequest
    prefix: str
    timeout_s: float
    replica: int | None = None
    interval_s: float | None = None
    so_far: ResponsePart = field(default_factory=ResponsePart)
    of_group: bool = False
    deadline: GroupDeadline | None = None


@dataclass(frozen=True)
class ExternalNews:
    """The tokens of a request since the news before. It has ended if `part` says how, or with a `failure`.

    `replica`: the one that ended it, -1 before; `error`: the message of a failure.
    """

    part: ResponsePart
    replica: int = -1
    failure: Failure = ""
    error: str = ""

    @property
    def ended(self) -> bool:
        """True if no news of this request follow."""
        return self.part.finish_reason is not None or bool(self.failure)


@dataclass(frozen=True)
class ExternalReport:
    """The news of all requests, by request id. `number` counts the reports of one gateway."""

    number: int
    news: dict[str, ExternalNews]


class _Tokens(dict[str, ResponsePart]):
    """The tokens of one request, which tells its owner when they change."""

    def __init__(self, name: str, so_far: ResponsePart, changed: set[str], wake: asyncio.Event) -> None:
        super().__init__({name: so_far})
        self._changed, self._wake = changed, wake

    def __setitem__(self, name: str, part: ResponsePart) -> None:
        super().__setitem__(name, part)
        # The end is told with the result, which also says why a response was given up.
        if part.finish_reason is None and part.response_ids:
            self._changed.add(name)
            self._wake.set()


@dataclass
class _Open:
    request: ExternalRequest
    tokens: _Tokens
    until: float  # time.monotonic
    told: int  # tokens that were in earlier news
    deadline: GroupDeadline | None = None
    end: ExternalNews | None = None  # without the tokens
    task: asyncio.Task[None] | None = None

    @property
    def part(self) -> ResponsePart:
        """The tokens so far."""
        return self.tokens[self.request.request.request_id]


class ExternalRequests:
    """Holds the requests of the run's gateway. Those of a gateway that was replaced are dropped.

    `serve` lets them go to the replicas, `hold` keeps them back while a trainer or a new controller makes the engines
    drop their requests; what they had reported is kept, and continued.
    """

    def __init__(self, fleet: EnginePool, *, serves: bool) -> None:
        """`serves`: the replicas have weights already."""
        self._fleet = fleet
        self._gateway = ""
        self._open: dict[str, _Open] = {}
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._replay: Replay[dict[str, ExternalNews]] = Replay({})
        self._serves = asyncio.Event()
        if serves:
            self._serves.set()

    def begin(self, gateway: str, requests: Sequence[ExternalRequest]) -> None:
        """Begin to work on requests; one that is known is not begun again. `gateway`: the name of the gateway's
        process."""
        self._greet(gateway)
        for each in requests:
            name = each.request.request_id
            if name in self._open:
                continue
            tokens = _Tokens(name, each.so_far, self._changed, self._wake)
            now = time.monotonic()
            deadline = None if each.deadline is None else each.deadline.received(now)
            opened = _Open(each, tokens, now + each.timeout_s, len(each.so_far.response_ids), deadline)
            self._open[name] = opened
            self._start(opened)

    def drop(self, gateway: str, names: Collection[str]) -> None:
        """Stop working on requests. Those that are not known, or have ended, are ignored."""
        self._greet(gateway)
        for name in names:
            self._drop(name)

    def _drop_all(self) -> None:
        for name in list(self._open):
            self._drop(name)

    def _drop(self, name: str) -> None:
        if (found := self._open.pop(name, None)) is not None and found.task is not None:
            found.task.cancel()

    async def take(self, gateway: str, seen: int, wait_s: float) -> ExternalReport:
        """Wait for news, `wait_s` at most, and return them. `seen`: the number of the last report that the gateway
        has."""
        self._greet(gateway)
        number, news = await self._replay.take(seen, partial(self._collect, gateway, wait_s))
        return ExternalReport(number, news) if gateway == self._gateway else ExternalReport(seen, {})

    async def _collect(self, gateway: str, wait_s: float) -> dict[str, ExternalNews]:
        """Wait for news, `wait_s` at most, and return those since the report before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._changed and gateway == self._gateway:
                    self._wake.clear()
                    await self._wake.wait()
        if gateway != self._gateway:
            return {}
        news = {name: each for name in self._changed if (each := self._news(name)) is not None}
        self._changed.clear()
        return news

    async def hold(self) -> None:
        """Keep all requests back until `serve`. When this returns, none is on its way to a replica."""
        self._serves.clear()
        held = [each for each in self._open.values() if each.end is None]
        running = [each.task for each in held if each.task is not None]
        for each in held:
            self._start(each)
        await cancel_all(running, "requests from outside")

    def serve(self) -> None:
        """Let the requests go to the replicas, from the tokens that they have. Nothing happens if they may already."""
        self._serves.set()

    def close(self) -> None:
        """Drop everything."""
        self._drop_all()

    def _greet(self, gateway: str) -> None:
        if gateway == self._gateway:
            return
        self._drop_all()
        self._gateway, self._replay = gateway, Replay({})
        self._changed.clear()
        self._wake.set()

    def _start(self, opened: _Open) -> None:
        opened.task = asyncio.get_running_loop().create_task(self._run(opened))

    async def _run(self, opened: _Open) -> None:
        """Bring a request to its end, whatever it is. A cancelled one has none."""
        asked = opened.request
        terms = CallTerms(foreign=True, of_group=asked.of_group, report_interval_s=asked.interval_s)
        context = RequestContext(asked.prefix, None, asked.replica, opened.deadline, opened.tokens)
        failure: Failure = ""
        error, replica = "", -1
        try:
            async with asyncio.timeout(opened.until - time.monotonic()) as limit:
                await self._serves.wait()
                [result] = await self._fleet.generate(context, [asked.request], terms=terms)
            replica = result.replica
            if result.finish_reason == "abort":
                failure, error = "unavailable", result.failure or "the engine dropped the request"
        except TimeoutError as broken:
            if limit.expired():
                failure, error = "late", self._late(opened)
            else:
                failure, error = "unavailable", clear_text(broken)
        except RequestFailed as refused:
            failure, error = "refused", str(refused)
        except Exception as broken:
            if not isinstance(broken, RolloutError):
                logger.exception("request %s", asked.request.request_id)
            failure, error = "unavailable", clear_text(broken)
        self._end(opened, ExternalNews(ResponsePart(), replica, failure, error))

    def _end(self, opened: _Open, end: ExternalNews) -> None:
        name = opened.request.request.request_id
        opened.end = end
        if self._open.get(name) is opened:
            self._changed.add(name)
            self._wake.set()

    def _late(self, opened: _Open) -> str:
        tokens, serving = len(opened.part.response_ids), self._fleet.serving
        held = "the engines wait for weights of the trainer"
        where = f"replicas that serve: {serving}" if self._serves.is_set() else held
        return (
            f"the request waited {opened.request.timeout_s:.0f} s (timeouts.generate_s) for the rollout pool; "
            f"it had {tokens} tokens; {where}"
        )

    def _news(self, name: str) -> ExternalNews | None:
        """Return what is new of a request; one that has ended is forgotten."""
        if (opened := self._open.get(name)) is None:
            return None
        part, known = opened.part, opened.told
        opened.told = len(part.response_ids)
        new = tokens_from(part, known)
        if opened.end is None:
            return ExternalNews(new)
        del self._open[name]
        return ExternalNews(new, opened.end.replica, opened.end.failure, opened.end.error)
