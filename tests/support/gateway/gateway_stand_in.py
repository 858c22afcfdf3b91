"""The gateway without Ray and engines: its real server, client and text, and the real fleet over replicas in this
process.

`StandInGateway(directory)` serves on 127.0.0.1 in a thread of its own until `close()`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.chat.images import PromptImages
from megarl.chat.tokenize import load_tokenizer, stop_token_ids
from megarl.common.errors import ReplicaFailed, RequestFailed
from megarl.config.schema import VisionConfig
from megarl.gateway.app import GatewayRoutes, GatewayServer, listen
from megarl.gateway.chats import Chats
from megarl.gateway.pool_client import ControllerClient
from megarl.gateway.request_fields import ModelLimits
from megarl.gateway.sessions import Sessions
from megarl.gateway.text import ModelText
from megarl.models.hf.read_config import load_info
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from megarl.rollout.fleet.external_requests import ExternalRequests
from tests.support.engines.fake_replicas import Method, SharesCalls, fleet_of

TOKEN = "t" * 32
MODEL = "stand-in"
# What a replica answers: the response's ids to a prompt, whatever `max_tokens` is.
Answer = Callable[[GenerateRequest], Sequence[int]]


@dataclass
class _Speech:
    ids: list[int]
    logprobs: list[float]
    task: asyncio.Task[None]
    said: int = 0


class SpeakingReplica(SharesCalls):
    """Answers with `answer(request)`, one token per turn of `pace`; log-prob of token t is -t/1000.

    While `going` is not set it makes no token, as an engine during a publication, which begins by itself after token
    `pause_after` of a response. `version` labels new tokens.
    """

    def __init__(self, index: int, answer: Answer, pace_s: float = 0.0) -> None:
        self.index, self.answer, self.pace_s = index, answer, pace_s
        self.version, self.dead = 0, False
        self.pause_after = 0
        self.going = asyncio.Event()
        self.going.set()
        self.asked: list[GenerateRequest] = []
        self.stopped: list[str] = []
        self._open: dict[str, _Speech] = {}
        self._versions: dict[str, list[int]] = {}
        for name in ("generate", "report", "end", "reset"):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    @property
    def working(self) -> int:
        return len(self._open)

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        self._check()
        for request in requests:
            if request.request_id in self._open:
                raise RequestFailed(f"{request.request_id} is open")
            self.asked.append(request)
            ids = list(self.answer(request))[: request.sampling.max_tokens]
            self._versions[request.request_id] = []
            task = asyncio.create_task(self._speak(request.request_id, len(ids)))
            self._open[request.request_id] = _Speech(ids, [-each / 1000 for each in ids], task)
        return await self._report({request.request_id: 0 for request in requests}, wait_s)

    async def _speak(self, name: str, count: int) -> None:
        for _ in range(count):
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            await self.going.wait()
            self._open[name].said += 1
            self._versions[name].append(self.version)
            if self._open[name].said == self.pause_after:
                self.going.clear()

    async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        self._check()
        if unknown := [name for name in reported if name not in self._open]:
            raise RequestFailed(f"unknown: {unknown}")
        tasks = [self._open[name].task for name in reported]
        await asyncio.wait(tasks, timeout=wait_s)
        self._check()
        return {name: self._part(name, known) for name, known in reported.items()}, EngineLoad()

    async def _end(self, reported: dict[str, int]) -> EngineReport:
        self._check()
        self.stopped += [name for name in reported if name in self._open]
        parts = {name: self._part(name, known, "abort") for name, known in reported.items() if name in self._open}
        for name in parts:
            self._forget(name)
        return parts, EngineLoad()

    async def _reset(self) -> None:
        self._check()
        for name in list(self._open):
            self._forget(name)

    def _forget(self, name: str) -> None:
        if (speech := self._open.pop(name, None)) is not None:
            speech.task.cancel()

    def _part(self, name: str, known: int, end: Any = None) -> ResponsePart:
        speech = self._open[name]
        ids, versions = speech.ids[: speech.said], self._versions[name]
        if speech.task.done() and end is None:
            end = "stop" if ids and ids[-1] in self.asked[0].sampling.stop_token_ids else "length"
            del self._open[name]
        spans: list[VersionSpan] = []
        for at in range(known, speech.said):
            if spans and spans[-1].version == versions[at]:
                spans[-1] = VersionSpan(versions[at], spans[-1].start, at + 1 - known)
            else:
                spans.append(VersionSpan(versions[at], at - known, at + 1 - known))
        return ResponsePart(ids[known:], speech.logprobs[known : speech.said], tuple(spans), end)

    def _check(self) -> None:
        if self.dead:
            raise ReplicaFailed(self.index, f"replica {self.index} is dead")


class ActorDiedError(Exception):
    """Named like Ray's error of an actor that has died."""


class LocalController:
    """The controller's methods for the gateway, without its actor. Once `dead`, every call fails."""

    def __init__(self, requests: ExternalRequests) -> None:
        self.requests, self.dead = requests, False
        self.calls = 0
        self.give, self.take = Method(self._give), Method(self._take)

    async def _give(self, number: int, messages: Sequence[Any], link: str) -> None:
        self._check()
        self.calls += 1
        await self.requests.link.give(number, messages, link)

    async def _take(self, seen: int, wait_s: float, link: str) -> Any:
        self._check()
        report = await self.requests.link.take(seen, min(wait_s, 0.2), link)
        self._check()
        return report

    def _check(self) -> None:
        if self.dead:
            raise ActorDiedError("the controller has died")


@dataclass
class Parts:
    """The parts that a test may look at; use them in the gateway's event loop only (`StandInGateway.call`)."""

    replicas: list[SpeakingReplica]
    fleet: Any
    controller: LocalController
    pool: ControllerClient
    sessions: Sessions


@dataclass
class StandInGateway:
    """A gateway over `count` replicas that answer with `answer`. `at`: the port of a gateway before it; 0: a free
    one."""

    model: Path
    answer: Answer
    count: int = 1
    pace_s: float = 0.0
    max_model_len: int = 4096
    timeout_s: float = 60.0
    most_sessions: int = 4000
    serves: bool = True
    at: int = 0
    sees: bool = False  # as the model does
    image_hosts: tuple[str, ...] = ()
    parts: Parts = field(init=False)
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the stand-in gateway did not start within 60 s"
        if self._failure is not None:
            raise self._failure

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, function: Callable[[Parts], Any]) -> Any:
        """Return what a function, or a coroutine function, of the parts returns in the gateway's event loop."""

        async def run() -> Any:
            result = function(self.parts)
            return await result if isinstance(result, Coroutine) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stand-in gateway did not end within 60 s"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        tokenizer = load_tokenizer(self.model)
        stops = tuple(stop_token_ids(self.model, tokenizer))
        replicas = [SpeakingReplica(index, self.answer, self.pace_s) for index in range(self.count)]
        fleet = fleet_of(dict(enumerate(replicas)), rpc_s=60.0, generate_s=600.0)
        controller = LocalController(ExternalRequests(fleet, serves=self.serves))

        async def find() -> LocalController:
            return self.parts.controller

        vision = VisionConfig(max_pixels=64 * 28 * 28, images_per_prompt=2)
        images = PromptImages.of(self.model, load_info(self.model), vision) if self.sees else None
        pool, text = ControllerClient("gateway-1", find, 60.0), ModelText(self.model, stops, images=images)
        limits = ModelLimits(self.max_model_len, len(tokenizer), stops)
        sessions = Sessions(self.most_sessions, 10**7, 600.0)
        self.parts = Parts(replicas, fleet, controller, pool, sessions)
        chats = Chats(text, limits, MODEL, self.image_hosts)
        server = GatewayServer(GatewayRoutes(pool, self.timeout_s, sessions, limits, chats, (MODEL,), TOKEN))
        listener = listen("127.0.0.1", self.at)
        self.port = listener.getsockname()[1]
        await server.start(listener)
        pump = asyncio.create_task(pool.run())
        self._ready.set()
        await self._end.wait()
        await server.close()
        pump.cancel()
        await asyncio.wait({pump}, timeout=60)
        text.close()
        self.parts.controller.requests.close()
        await asyncio.sleep(0)
