"""Requests from outside the run, which the gateway passes on to the controller.

They go through the fleet like those of training groups: they wait out a publication and continue elsewhere when a
replica is lost. Admission does not know them. Some come from harnesses that act for the run's groups: these have the
group's deadline, and a publication that lets responses end waits for them.

Their messages share a few calls (`transport/link.py`): a call per response would cost more than a short response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.common.errors import RequestFailed, RolloutError, clear_text
from megarl.rollout.engine.continuation import GroupDeadline, RequestContext
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.response_parts import ResponsePart, tokens_from
from megarl.rollout.fleet.calls import CallTerms
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.transport.background import cancel_all
from megarl.rollout.transport.link import LinkServer

logger = logging.getLogger(__name__)

# How a request failed: the engine refused it, its time was up, or the pool could not serve it.
Failure = Literal["", "refused", "late", "unavailable"]


@dataclass(frozen=True)
class ExternalRequest:
    """A request of the gateway. `timeout_s` counts from its arrival at the controller.

    `prefix`: requests with the same one share the beginning of their prompts; `replica`, if known, has it in its KV
    cache. `interval_s`: time between reports of its tokens; None: as for training. `so_far`: its tokens from a dead
    controller. `of_group`: it is made for a group of the run; `deadline`: the group's, as `GroupDeadline.sent`.
    """

    request: GenerateRequest
    prefix: str
    timeout_s: float
    replica: int | None = None
    interval_s: float | None = None
    so_far: ResponsePart = field(default_factory=ResponsePart)
    of_group: bool = False
    deadline: GroupDeadline | None = None

    @property
    def size(self) -> int:
        """Its approximate size, as a count of numbers."""
        return len(self.request.prompt_ids)


@dataclass(frozen=True)
class ExternalDrop:
    """Drops the request `name`, for which nobody waits; ignored if it is unknown or has ended."""

    name: str
    size = 1


@dataclass(frozen=True)
class ExternalNews:
    """The tokens of a request since the last news. `part` or a `failure` says how it ended.

    `replica`: which one ended it, -1 before; `error`: the message of a failure.
    """

    name: str
    part: ResponsePart
    replica: int = -1
    failure: Failure = ""
    error: str = ""

    @property
    def ended(self) -> bool:
        """True if this is the last news of the request."""
        return self.part.finish_reason is not None or bool(self.failure)


class _Open(dict[str, ResponsePart]):
    """A request, with its tokens so far under its name. `notify` is called with it when it has more.

    `until`: by `time.monotonic`; `reported`: how many tokens earlier news had; `end`: its last news, without tokens;
    `waits`: it has news that no call has taken.
    """

    size = 64  # of its news on average

    def __init__(self, request: ExternalRequest, now: float, notify: Callable[[_Open], object]) -> None:
        self.name = request.request.request_id
        super().__init__({self.name: request.so_far})
        self.request, self._notify = request, notify
        self.until, self.reported, self.waits = now + request.timeout_s, len(request.so_far.response_ids), False
        self.deadline = None if request.deadline is None else request.deadline.received(now)
        self.end: ExternalNews | None = None
        self.task: asyncio.Task[None] | None = None

    def __setitem__(self, name: str, part: ResponsePart) -> None:
        super().__setitem__(name, part)
        # The end comes with the result, which also says why a response was given up.
        if part.finish_reason is None and part.response_ids:
            self._notify(self)

    @property
    def part(self) -> ResponsePart:
        """The tokens so far."""
        return self[self.name]


class ExternalRequests:
    """Holds the requests of the run's gateway, which come by `link`; drops those of a replaced gateway.

    `serve` lets them go to the replicas; `hold` keeps them back while a trainer or a new controller makes the engines
    drop their requests. Their reported tokens are kept, and continued later.
    """

    def __init__(self, fleet: EnginePool, *, serves: bool) -> None:
        """`serves`: the replicas already have weights."""
        self._fleet = fleet
        self._open: dict[str, _Open] = {}
        self._serves = asyncio.Event()
        if serves:
            self._serves.set()
        self.link: LinkServer[Any] = LinkServer(self._receive, int, 0.0, begun=self.close, pack=self._news)

    async def _receive(self, messages: Sequence[ExternalRequest | ExternalDrop]) -> None:
        for each in messages:
            if isinstance(each, ExternalRequest):
                opened = _Open(each, time.monotonic(), self._notify)
                self._open[opened.name] = opened
                self._start(opened)
            elif (found := self._open.pop(each.name, None)) is not None and found.task is not None:
                found.task.cancel()

    async def hold(self) -> None:
        """Keep all requests back until `serve`. On return, none is on its way to a replica."""
        self._serves.clear()
        held = [each for each in self._open.values() if each.end is None]
        running = [each.task for each in held if each.task is not None]
        for each in held:
            self._start(each)
        await cancel_all(running, "requests from outside")

    def serve(self) -> None:
        """Let the requests go to the replicas and continue from their tokens. Idempotent."""
        self._serves.set()

    def close(self) -> None:
        """Drop everything."""
        for each in self._open.values():
            if each.task is not None:
                each.task.cancel()
        self._open.clear()

    def _start(self, opened: _Open) -> None:
        opened.task = asyncio.get_running_loop().create_task(self._run(opened))

    async def _run(self, opened: _Open) -> None:
        """Bring a request to its end, unless it is cancelled."""
        asked = opened.request
        terms = CallTerms(foreign=True, of_group=asked.of_group, report_interval_s=asked.interval_s)
        context = RequestContext(asked.prefix, None, asked.replica, opened.deadline, opened)
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
        opened.end = ExternalNews(opened.name, ResponsePart(), replica, failure, error)
        self._notify(opened)

    def _notify(self, opened: _Open) -> None:
        """Queue a request's news for the next call."""
        if not opened.waits and self._open.get(opened.name) is opened:
            opened.waits = True
            self.link.outbox.put(opened)

    def _late(self, opened: _Open) -> str:
        tokens, serving = len(opened.part.response_ids), self._fleet.serving
        held = "the engines wait for weights from the trainer"
        where = f"replicas that serve: {serving}" if self._serves.is_set() else held
        return (
            f"the request waited {opened.request.timeout_s:.0f} s (timeouts.generate_s) for the rollout pool; "
            f"it had {tokens} tokens; {where}"
        )

    def _news(self, opened: _Open) -> ExternalNews:
        """Return the news of a request; forget it if it has ended."""
        opened.waits = False
        part, known = opened.part, opened.reported
        opened.reported = len(part.response_ids)
        new = tokens_from(part, known)
        if opened.end is None:
            return ExternalNews(opened.name, new)
        self._open.pop(opened.name, None)
        return replace(opened.end, part=new)
