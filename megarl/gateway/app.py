"""The gateway's HTTP server: its routes, who may use them, and its bounds on what a client sends and how slowly."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import resource
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from megarl.common.values import MIB
from megarl.gateway.chat_route import ChatRequest, read_chat_request
from megarl.gateway.chats import Chats
from megarl.gateway.pool_client import ControllerClient, Generations, ends_of
from megarl.gateway.recording import Recording, recording_in, session_content
from megarl.gateway.request_fields import BOUNDS, ApiError, ModelLimits, parse_object, unauthorized
from megarl.gateway.session_terms import RUN_SESSIONS, read_terms
from megarl.gateway.sessions import NoRoom, NotOpened, SessionExists, Sessions
from megarl.gateway.token_route import read_token_request, token_answer

# Ends connections whose client does not send the head of a request in time.
#
# aiohttp 3.14 ends idle connections only after their first request, so a client that never completes one could keep a
# connection, and with many of them all descriptors, for ever.

HEAD_S = 30.0
AGAIN_S = 1.0


class SlowClients:
    """Watches the connections of one server."""

    def __init__(self, head_s: float = HEAD_S) -> None:
        """`head_s`: the time from the connection to the end of the first request's head."""
        self._head_s = head_s
        self._silent: set[asyncio.BaseProtocol] = set()  # for `head_s` after their connection at most

    def watched(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """Return what makes the protocol of each connection of a server."""

        def connect() -> asyncio.Protocol:
            made = server()
            self._silent.add(made)
            asyncio.get_running_loop().call_later(self._head_s, self._end_if_silent, made)
            return made

        return connect

    def asked(self, request: web.Request) -> None:
        """Note that the client of a request has sent its head."""
        self._silent.discard(request.protocol)

    def _end_if_silent(self, connection: web.RequestHandler, last: bool = False) -> None:
        if connection not in self._silent:
            return
        if not last:  # after a stall of this process the head may be here, and not be read yet
            asyncio.get_running_loop().call_later(AGAIN_S, self._end_if_silent, connection, True)
            return
        self._silent.discard(connection)
        connection.force_close()


# Takes the items of an asynchronous generator that runs in a task of its own, with a bound on each wait.
#
# All steps of the generator run in that one task, so its time-outs and clean-up work as in a coroutine.

END = object()  # the generator has ended
LATE = object()  # nothing has come in time; the generator goes on


class Items:
    """The items that a generator has made and nobody has taken."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    async def next(self, timeout_s: float | None) -> Any:  # noqa: ANN401  # what the generator makes
        """Return the next item, END, or LATE after `timeout_s`. Raises what the generator raised."""
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            return LATE
        if isinstance(item, Exception):
            raise item
        return item

    async def take_all(self, generator: AsyncGenerator[Any, None]) -> None:
        """Run a generator to its end."""
        try:
            async for item in generator:
                self._queue.put_nowait(item)
        except Exception as error:
            self._queue.put_nowait(error)
        else:
            self._queue.put_nowait(END)
        finally:
            await generator.aclose()


@asynccontextmanager
async def background_items(generator: AsyncGenerator[Any, None]) -> AsyncIterator[Items]:
    """Give the items of a generator, which has ended, or is closed, when the block has."""
    items = Items()
    task = asyncio.create_task(items.take_all(generator))
    try:
        yield items
    finally:
        task.cancel()
        await asyncio.wait({task})


logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
LARGEST_BODY = 64 * MIB
BODY_S = 60.0  # in which a client has to send its request
KEEP_ALIVE_S = 75.0
SILENCE_S = 15.0  # after which a streamed answer says that it is still being made
EXPIRE_S = 30.0  # between two looks for sessions that nobody uses
REACHED_S = 30.0  # for which the controller may be gone before the gateway says that it is not healthy
BACKLOG = 2048
_SESSION_NAME = re.compile(r"[\x21-\x7e]{1,256}")
_JSON = "application/json"
_IN_SESSION = "/in/{session}"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayRoutes:
    """Answers requests by the parts that it is given. `models`: the names under which clients may ask for the model."""

    def __init__(
        self, link: ControllerClient, generations: Generations, sessions: Sessions, limits: ModelLimits, chats: Chats,
        models: tuple[str, ...], token: str,
    ) -> None:  # fmt: skip
        self._link, self._generations, self._sessions = link, generations, sessions
        self._limits, self._chats, self._models, self._token = limits, chats, models, token.encode()
        self._started = int(time.time())
        self.slow = SlowClients()

    def application(self) -> web.Application:
        """Return the application of aiohttp."""
        app = web.Application(middlewares=[self._guarded], client_max_size=LARGEST_BODY)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._list_models),
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                # The same for clients that cannot send the header: their base URL names the session.
                web.get(f"{_IN_SESSION}/v1/models", self._list_models),
                web.post(f"{_IN_SESSION}/inference/v1/generate", self._generate),
                web.post(f"{_IN_SESSION}/v1/chat/completions", self._chat),
                web.get("/v1/sessions/{name}", self._show_session),
                web.put("/v1/sessions/{name}", self._open_session),
                web.delete("/v1/sessions/{name}", self._end_session),
            ]
        )
        app.cleanup_ctx.append(self._expiring)
        return app

    async def _expiring(self, app: web.Application) -> Any:  # noqa: ANN401  # an asynchronous generator
        async def expire() -> None:
            while True:
                await asyncio.sleep(EXPIRE_S)
                self._sessions.expire(time.monotonic())

        task = asyncio.create_task(expire())
        yield
        task.cancel()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request pass that has the token; answer errors in OpenAI's form."""
        self.slow.asked(request)
        try:
            if request.path != "/health":
                self._authenticate(request)
            return await handler(request)
        except ApiError as error:
            self._note_refusal(request, error)
            return _json(error.content(), error.status)
        except NotOpened:
            missing = _no_session()
            return _json(missing.content(), missing.status)
        except NoRoom as error:
            full = ApiError(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded")
            return _json(full.content(), full.status)
        except web.HTTPException as error:
            return _json(ApiError(error.status, error.reason).content(), error.status)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            told = ApiError(500, "the gateway failed; its log says why", kind="server_error")
            return _json(told.content(), told.status)

    def _authenticate(self, request: web.Request) -> None:
        """Raise ApiError without the right bearer token; the comparison takes the same time for all wrong ones."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        # Bytes of a header that are no UTF-8 arrive as surrogates.
        same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token)
        if kind.lower() != "bearer" or not same:
            raise unauthorized()

    def _note_refusal(self, request: web.Request, error: ApiError) -> None:
        """Keep in its session that a request has met a bound, by which the run knows why its agent then fails."""
        session = self._sessions.get(_name_of(request) or "")
        if session is not None and error.code in BOUNDS:
            session.refused = error.code or ""

    async def _health(self, request: web.Request) -> web.Response:
        """Answer 200 while the rollout controller is reached; anybody may ask."""
        return web.Response(status=503 if self._link.lost_s(time.monotonic()) > REACHED_S else 200)

    async def _list_models(self, request: web.Request) -> web.Response:
        entry = {"object": "model", "created": self._started, "owned_by": "megarl"}
        length = {"max_model_len": self._limits.max_model_len}
        return _json({"object": "list", "data": [{"id": name, **entry, **length} for name in self._models]})

    async def _generate(self, request: web.Request) -> web.Response:
        asked = read_token_request(await _body(request), self._limits, uuid.uuid4().hex)
        self._check_model(asked.model)
        with recording_in(self._sessions, _session_of(request), asked.request_id) as recording:
            parent = recording.continued_by(asked.prompt_ids)
            sampling, place = recording.sampling(asked.sampling), recording.place(parent)
            async with self._generations.open(asked.prompt_ids, sampling, place) as opened:
                parts = await ends_of(opened)
            for part, each in zip(parts, opened, strict=True):
                recording.add(asked.prompt_ids, part, parent, asked.request_id, each.replica)
            return _json(token_answer(asked, self._models[0], int(time.time()), parts, recording.fields()))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked, request_id = read_chat_request(await _body(request)), uuid.uuid4().hex
        self._check_model(asked.fields.model or None)
        with recording_in(self._sessions, _session_of(request), request_id) as recording:
            if not asked.fields.stream:
                return _json(await self._chats.answer(asked, request_id, recording))
            return await self._stream(request, asked, request_id, recording)

    async def _stream(
        self, request: web.Request, asked: ChatRequest, request_id: str, recording: Recording
    ) -> web.StreamResponse:
        """Send a chat's answer as server-sent events. An error after its beginning is an event, as in vLLM."""
        async with background_items(self._chats.stream(asked, request_id, recording)) as chunks:
            await chunks.next(None)  # raises what the request has done wrong, while there can be a status
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            try:
                while (chunk := await chunks.next(SILENCE_S)) is not END:
                    await response.write(b": waiting\n\n" if chunk is LATE else _event(chunk))
            except ApiError as error:
                await response.write(_event(error.content()))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            return response

    async def _show_session(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["name"])
        if session is None:
            raise _no_session()
        return _json(session_content(session))

    async def _open_session(self, request: web.Request) -> web.Response:
        name, body = _checked_name(request.match_info["name"]), await _body(request)
        now = time.monotonic()
        try:
            self._sessions.open(name, read_terms(body, now), now)
        except SessionExists as error:
            raise ApiError(409, str(error), code="session_exists") from None
        return _json({"opened": True})

    async def _end_session(self, request: web.Request) -> web.Response:
        if not self._sessions.end(request.match_info["name"]):
            raise _no_session()
        return _json({"deleted": True})

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._models:
            told = f"the gateway serves {self._models[0]!r}, not {name!r}"
            raise ApiError(404, told, field="model", code="model_not_found")


def _no_session() -> ApiError:
    told = (
        "there is no such session: it never began, was ended, nobody used it for too long (twice timeouts.generate_s), "
        f"or its gateway has died; nothing but PUT opens one whose name begins with {RUN_SESSIONS!r}"
    )
    return ApiError(404, told, code="session_not_found")


def _session_of(request: web.Request) -> str | None:
    name = _name_of(request)
    return None if name is None else _checked_name(name)


def _name_of(request: web.Request) -> str | None:
    return request.match_info.get("session") or request.headers.get(SESSION_HEADER)


def _checked_name(name: str) -> str:
    if not _SESSION_NAME.fullmatch(name):
        raise ApiError(400, f"{SESSION_HEADER} must have 1 to 256 visible ASCII characters", field=SESSION_HEADER)
    return name


async def _body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises ApiError if it is none, too large, or comes too slowly."""
    try:
        async with asyncio.timeout(BODY_S):
            content = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the gateway waited {BODY_S:.0f} s for the client to send its request") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"the request has more than {LARGEST_BODY // MIB} MiB") from None
    try:
        return parse_object(msgspec.json.decode(content))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


def _json(content: Any, status: int = 200) -> web.Response:  # noqa: ANN401  # what msgspec can encode
    return web.Response(body=msgspec.json.encode(content), status=status, content_type=_JSON)


def _event(content: Any) -> bytes:  # noqa: ANN401  # what msgspec can encode
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class GatewayServer:
    """Listens at one address and serves the routes until it is closed."""

    def __init__(self, routes: GatewayRoutes) -> None:
        self._runner = web.AppRunner(
            routes.application(), access_log=None, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=1.0,
        )  # fmt: skip
        self._slow = routes.slow

    async def start(self, listener: socket.socket) -> None:
        """Serve at a socket that is bound already."""
        allow_open_files()
        await self._runner.setup()
        listener.setblocking(False)
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._slow.watched(server), sock=listener, backlog=BACKLOG)

    async def close(self) -> None:
        """Stop listening, and end the requests that are under way."""
        self._server.close()
        await self._runner.cleanup()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to one address; port 0: a free one. Raises OSError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one: each client's connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
