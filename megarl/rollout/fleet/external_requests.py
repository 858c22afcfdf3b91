"""Requests from outside the run, which the gateway passes on to the controller: begun, watched, dropped.

They go through the fleet like those of training groups, so they wait out a publication and go on elsewhere when a
replica is lost; admission knows nothing of them. Some are of the run's own groups, whose samples a harness acts for:
these have the group's deadline, and a publication that lets responses end waits for them.

Their messages share few calls (`transport/link.py`): a call per response would cost more than a short response.
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

    @property
    def size(self) -> int:
        """About how many numbers it has."""
        return len(self.request.prompt_ids)


@dataclass(frozen=True)
class ExternalDrop:
    """Nobody waits any more for the request of a name. One that is not known, or has ended, is ignored."""

    name: str
    size = 1


@dataclass(frozen=True)
class ExternalNews:
    """The tokens of a request since the news before. It has ended if `part` says how, or with a `failure`.

    `replica`: which one ended it, -1 before; `error`: the message of a failure.
    """

    name: str
    part: ResponsePart
    replica: int = -1
    failure: Failure = ""
    error: str = ""

    @property
    def ended(self) -> bool:
        """True if no news of this request follow."""
        return self.part.finish_reason is not None or bool(self.failure)


class _Open(dict[str, ResponsePart]):
    """A request, and by its name the tokens so far. `tell`: called with it when it has more.

    `until`: by `time.monotonic`; `reported`: tokens that were in earlier news; `end`: without the tokens; `waits`: it
    has news that no call has taken.
    """

    size = 64  # of its news, as they are on average

    def __init__(self, request: ExternalRequest, now: float, tell: Callable[[_Open], object]) -> None:
        self.name = request.request.request_id
        super().__init__({self.name: request.so_far})
        self.request, self._tell = request, tell
        self.until, self.reported, self.waits = now + request.timeout_s, len(request.so_far.response_ids), False
        self.deadline = None if request.deadline is None else request.deadline.received(now)
        self.end: ExternalNews | None = None
        self.task: asyncio.Task[None] | None = None

    def __setitem__(self, name: str, part: ResponsePart) -> None:
        super().__setitem__(name, part)
        # The end is reported with the result, which also says why a response was given up.
        if part.finish_reason is None and part.response_ids:
            self._tell(self)

    @property
    def part(self) -> ResponsePart:
        """The tokens so far."""
        return self[self.name]


class ExternalRequests:
    """Holds the requests of the run's gateway, which come by `link`. Those of a gateway that was replaced are dropped.

    `serve` lets them go to the replicas, `hold` keeps them back while a trainer or a new controller makes the engines
    drop their requests; what they had reported is kept, and continued.
    """

    def __init__(self, fleet: EnginePool, *, serves: bool) -> None:
        """`serves`: the replicas have weights already."""
        self._fleet = fleet
        self._open: dict[str, _Open] = {}
        self._serves = asyncio.Event()
        if serves:
            self._serves.set()
        self.link: LinkServer[Any] = LinkServer(self._receive, int, 0.0, begun=self.close, pack=self._news)

    async def _receive(self, messages: Sequence[ExternalRequest | ExternalDrop]) -> None:
        for each in messages:
            if isinstance(each, ExternalRequest):
                opened = _Open(each, time.monotonic(), self._tell)
                self._open[opened.name] = opened
                self._start(opened)
            elif (found := self._open.pop(each.name, None)) is not None and found.task is not None:
                found.task.cancel()

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
        for each in self._open.values():
            if each.task is not None:
                each.task.cancel()
        self._open.clear()

    def _start(self, opened: _Open) -> None:
        opened.task = asyncio.get_running_loop().create_task(self._run(opened))

    async def _run(self, opened: _Open) -> None:
        """Bring a request to its end, whatever it is. A cancelled one has none."""
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
        self._tell(opened)

    def _tell(self, opened: _Open) -> None:
        """Let the next call have the news of a request, all since the call before."""
        if not opened.waits and self._open.get(opened.name) is opened:
            opened.waits = True
            self.link.outbox.put(opened)

    def _late(self, opened: _Open) -> str:
        tokens, serving = len(opened.part.response_ids), self._fleet.serving
        held = "the engines wait for weights of the trainer"
        where = f"replicas that serve: {serving}" if self._serves.is_set() else held
        return (
            f"the request waited {opened.request.timeout_s:.0f} s (timeouts.generate_s) for the rollout pool; "
            f"it had {tokens} tokens; {where}"
        )

    def _news(self, opened: _Open) -> ExternalNews:
        """Return what is new of a request; one that has ended is forgotten."""
        opened.waits = False
        part, known = opened.part, opened.reported
        opened.reported = len(part.response_ids)
        new = tokens_from(part, known)
        if opened.end is None:
            return ExternalNews(opened.name, new)
        self._open.pop(opened.name, None)
        return replace(opened.end, part=new)
