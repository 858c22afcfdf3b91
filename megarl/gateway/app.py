"""The gateway's HTTP server: its routes, their authentication, and bounds on the size and slowness of requests."""

import asyncio
import hmac
import logging
import re
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import msgspec
from aiohttp import web

from megarl.common.values import MIB
from megarl.gateway.chat_route import ChatRequest, read_chat_request
from megarl.gateway.chats import Chats
from megarl.gateway.exchange import Exchange, exchange_in
from megarl.gateway.pool_client import ControllerClient
from megarl.gateway.request_fields import ApiError, ModelLimits, read_terms
from megarl.gateway.sessions import Sessions, session_content
from megarl.gateway.token_route import read_token_request, token_answer

HEAD_S = 30.0
AGAIN_S = 1.0


class SlowClients:
    """Ends connections of a server whose client does not send the head of a request in time.

    aiohttp 3.14 ends idle connections only after their first request. A client that never completes one could keep
    connections, and so all descriptors, forever.
    """

    def __init__(self, head_s: float = HEAD_S) -> None:
        """`head_s`: the time from the connection to the end of the first request's head."""
        self._head_s = head_s
        self._silent: set[asyncio.BaseProtocol] = set()  # connections without a head yet

    def watched(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """Return the protocol factory of a server's connections."""

        def connect() -> asyncio.Protocol:
            made = server()
            self._silent.add(made)
            asyncio.get_running_loop().call_later(self._head_s, self._end_if_silent, made)
            return made

        return connect

    def asked(self, request: web.Request) -> None:
        """Record that the client of a request has sent its head."""
        self._silent.discard(request.protocol)

    def _end_if_silent(self, connection: web.RequestHandler, last: bool = False) -> None:
        if connection not in self._silent:
            return
        if not last:  # after a stall of this process the head may be waiting unread
            asyncio.get_running_loop().call_later(AGAIN_S, self._end_if_silent, connection, True)
            return
        self._silent.discard(connection)
        connection.force_close()


logger = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"
LARGEST_BODY = 64 * MIB
BODY_S = 60.0  # in which a client must send its request
KEEP_ALIVE_S = 75.0
SILENCE_S = 15.0  # between keep-alive comments of a streamed answer
EXPIRE_S = 30.0  # between two checks for unused sessions
REACHED_S = 30.0  # the controller may be gone this long before the gateway reports itself as unhealthy
BACKLOG = 2048
_SESSION_NAME = re.compile(r"[\x21-\x7e]{1,256}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayRoutes:
    """Answers requests. `models`: the model's names for clients. `timeout_s`: the time limit of a response."""

    def __init__(
        self, pool: ControllerClient, timeout_s: float, sessions: Sessions, limits: ModelLimits, chats: Chats,
        models: tuple[str, ...], token: str,
    ) -> None:  # fmt: skip
        self._pool, self._timeout_s, self._sessions = pool, timeout_s, sessions
        self._limits, self._chats, self._models, self._token = limits, chats, models, token.encode()
        self._started = int(time.time())
        self.slow = SlowClients()

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[self._guarded], client_max_size=LARGEST_BODY)
        app.router.add_get("/health", self._health)
        # The session may be in the path, for clients that can set a base URL but no header.
        for begin in ("", "/in/{session}"):
            app.router.add_get(f"{begin}/v1/models", self._list_models)
            app.router.add_post(f"{begin}/inference/v1/generate", self._generate)
            app.router.add_post(f"{begin}/v1/chat/completions", self._chat)
        app.router.add_get("/v1/sessions/{name}", self._show_session)
        app.router.add_put("/v1/sessions/{name}", self._open_session)
        app.router.add_delete("/v1/sessions/{name}", self._end_session)
        app.cleanup_ctx.append(self._expiring)
        return app

    async def _expiring(self, app: web.Application) -> AsyncIterator[None]:
        async def expire() -> None:
            while True:
                await asyncio.sleep(EXPIRE_S)
                self._sessions.expire(time.monotonic())

        task = asyncio.create_task(expire())
        yield
        task.cancel()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass on requests that have the token; answer errors in OpenAI's form."""
        self.slow.asked(request)
        try:
            if request.path != "/health":
                self._authenticate(request)
            return await handler(request)
        except ApiError as error:
            failure = error
        except web.HTTPException as error:
            failure = ApiError(error.status, error.reason)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            failure = ApiError(500, "the gateway failed; its log says why", kind="server_error")
        return _json(failure.content(), failure.status)

    def _authenticate(self, request: web.Request) -> None:
        """Raise ApiError without the right bearer token; the comparison takes constant time."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        # Bytes of a header that are not UTF-8 arrive as surrogates.
        same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token)
        if kind.lower() != "bearer" or not same:
            message = (
                "the bearer token is missing or wrong; gateway.json names the file that has the token of this gateway"
            )
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")

    async def _health(self, request: web.Request) -> web.Response:
        """Answer 200 while the rollout controller is reached; needs no token."""
        return web.Response(status=503 if self._pool.lost_s() > REACHED_S else 200)

    async def _list_models(self, request: web.Request) -> web.Response:
        entry = {"object": "model", "created": self._started, "owned_by": "megarl"}
        length = {"max_model_len": self._limits.max_model_len}
        return _json({"object": "list", "data": [{"id": name, **entry, **length} for name in self._models]})

    def _exchange(self, request: web.Request) -> AbstractContextManager[Exchange]:
        name = request.match_info.get("session") or request.headers.get(SESSION_HEADER)
        return exchange_in(self._sessions, None if name is None else _checked_name(name), self._pool, self._timeout_s)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _body(request)
        with self._exchange(request) as exchange:
            asked, sampling, choice = read_token_request(body, self._limits, exchange.id)
            self._check_model(asked.model or None)
            exchange.id, session, prompt_ids = asked.request_id or "", exchange.session, asked.token_ids
            exchange.begin(prompt_ids, choice, None if session is None else session.continued_by(prompt_ids))
            parts = await exchange.results()
            for response, part in zip(exchange.responses, parts, strict=True):
                exchange.record(response, part)
            logprobs = sampling.logprobs is not None
            return _json(token_answer(asked, self._models[0], parts, exchange.fields(), logprobs=logprobs))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        with self._exchange(request) as exchange:
            asked = read_chat_request(body)
            self._check_model(asked.model or None)
            if asked.stream:
                return await self._stream(request, asked, exchange)
            return _json(await self._chats.answer(asked, exchange))

    async def _stream(self, request: web.Request, asked: ChatRequest, exchange: Exchange) -> web.StreamResponse:
        """Send a chat's answer as server-sent events. A later error is an event, as in vLLM."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(chunk: Mapping[str, Any]) -> None:
            if not response.prepared:  # before this, an error can still have a status
                await response.prepare(request)
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")

        async def say_waiting() -> None:
            with suppress(ConnectionError):  # the client has gone; the request is cancelled
                while True:
                    await asyncio.sleep(SILENCE_S)
                    if response.prepared:
                        await response.write(b": waiting\n\n")

        waiting = asyncio.create_task(say_waiting())
        try:
            await self._chats.stream(asked, exchange, send)
        except ApiError as error:
            if not response.prepared:
                raise
            await send(error.content())
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _show_session(self, request: web.Request) -> web.Response:
        return _json(session_content(self._sessions.get(request.match_info["name"])))

    async def _open_session(self, request: web.Request) -> web.Response:
        name, body = _checked_name(request.match_info["name"]), await _body(request)
        now = time.monotonic()
        self._sessions.open(name, read_terms(body, now), now)
        return _json({"opened": True})

    async def _end_session(self, request: web.Request) -> web.Response:
        self._sessions.end(request.match_info["name"])
        return _json({"deleted": True})

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._models:
            message = f"the gateway serves {self._models[0]!r}, not {name!r}"
            raise ApiError(404, message, field="model", code="model_not_found")


def _checked_name(name: str) -> str:
    if not _SESSION_NAME.fullmatch(name):
        raise ApiError(400, f"{SESSION_HEADER} must have 1 to 256 visible ASCII characters", field=SESSION_HEADER)
    return name


async def _body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises ApiError if it is not one, too large, or too slow."""
    try:
        async with asyncio.timeout(BODY_S):
            content = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the gateway waited {BODY_S:.0f} s for the client to send its request") from None
    except web.HTTPRequestEntityTooLarge:
        raise ApiError(413, f"the request has more than {LARGEST_BODY // MIB} MiB") from None
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None


def _json(content: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


class GatewayServer:
    """Listens at one address and serves the routes until it is closed."""

    def __init__(self, routes: GatewayRoutes) -> None:
        self._runner = web.AppRunner(
            routes.application(), access_log=None, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=1.0,
        )  # fmt: skip
        self._slow = routes.slow

    async def start(self, listener: socket.socket) -> None:
        """Serve on a bound socket."""
        allow_open_files()
        await self._runner.setup()
        listener.setblocking(False)
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._slow.watched(server), sock=listener, backlog=BACKLOG)

    async def close(self) -> None:
        """Stop listening, and end running requests."""
        self._server.close()
        await self._runner.cleanup()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to one address; port 0: a free one. Raises OSError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
