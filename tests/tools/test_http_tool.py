"""A remote tool: what is sent, which answers are repeated, and the bounds on time and size."""

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.cluster.pool.ray_head import ReservedPorts
from megarl.tools.http_tool import MAX_RESPONSE, HttpTool
from megarl.tools.tool import MAX_IMAGE_BYTES, ToolAnswer
from tests.support.models.tiny_vision import picture

PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
LONG_S = 60.0


class Server(ThreadingHTTPServer):
    """Gives the answers of a list, one after the other; the last one forever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, str]] = [(200, '{"text": "fine"}')]
        self.headers_back: dict[str, str] = {}
        self.requests: list[tuple[dict[str, str], Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/call"


class Handler(BaseHTTPRequestHandler):
    """Records a request and gives the next answer."""

    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((dict(self.headers), json.loads(body)))
        status, text = self.server.answers[0] if len(self.server.answers) == 1 else self.server.answers.pop(0)
        if status == 0:  # the connection breaks
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if status == 1:  # no answer
            time.sleep(30)
            return
        self.send_response(status)
        for name, value in self.server.headers_back.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def call(url: str, timeout_s: float = LONG_S, **more: Any) -> ToolAnswer:
    async def once() -> ToolAnswer:
        tool = HttpTool("search", url, description="Search.", parameters=PARAMETERS, **more)
        try:
            return await tool.call({"query": "x"}, timeout_s=timeout_s)
        finally:
            await tool.close()

    return asyncio.run(once())


def test_a_call_with_a_token(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "t0ken")
    assert call(server.url, token={"env": "SEARCH_TOKEN"}) == ToolAnswer("fine")
    ((headers, body),) = server.requests
    assert headers["Authorization"] == "Bearer t0ken"
    assert body == {"name": "search", "arguments": {"query": "x"}}


@pytest.mark.parametrize(
    ("status", "text", "answer"),
    [
        (200, '{"text": "wrong", "error": true}', ToolAnswer("wrong", error=True)),
        (200, '{"found": [1]}', ToolAnswer('{"found": [1]}')),
        (200, "plain", ToolAnswer("plain")),
        (404, "nothing here", ToolAnswer("error: search: status 404: nothing here", error=True)),
        (302, "", ToolAnswer("error: search: status 302: ", error=True)),
    ],
)
def test_answers(server: Server, status: int, text: str, answer: ToolAnswer) -> None:
    server.answers = [(status, text)]
    server.headers_back = {"Location": "http://127.0.0.1:1/"} if status == 302 else {}
    assert call(server.url) == answer
    assert len(server.requests) == 1


def shown(*urls: object) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps([{"type": "text", "text": "Seen: "}, *parts])


def test_an_answer_with_images(server: Server) -> None:
    content, mark = picture(90, 60, 1), "data:image/png;base64,"
    text = shown(mark + base64.b64encode(content).decode(), mark + base64.b64encode(bytes(2 << 20)).decode())
    server.answers = [(200, text)]
    assert call(server.url, images=True) == ToolAnswer("Seen: <image><image>", images=(content, bytes(2 << 20)))
    assert "longer than" in call(server.url).text, "only a tool with images may answer at such length"
    server.answers = [(200, "[1, 2]")]
    assert call(server.url, images=True) == ToolAnswer("[1, 2]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (shown("https://example.com/a.png"), "ValueError: it must be a data URL"),
        (shown("file:///etc/passwd"), "ValueError: it must be a data URL"),
        (shown(f"data:image/png;base64,{'A' * (MAX_IMAGE_BYTES * 4 // 3 + 8)}"), "it has more than"),
        ('[{"type": "image", "image": "a.png"}]', "TypeError"),
        ('[{"type": "image_url"}]', "KeyError"),
        ('[{"type": "image_url", "image_url": {"url": 5}}]', "AttributeError"),
    ],
    ids=["address", "file", "size", "path", "form", "number"],
)
def test_images_that_cannot_be_used(server: Server, text: str, message: str) -> None:
    server.answers = [(200, text)]
    answer = call(server.url, images=True)
    assert answer.error and "chat parts that cannot be used: " in answer.text and message in answer.text


@pytest.mark.parametrize("bad", [(0, ""), (500, "broken"), (503, "later")])
def test_only_an_idempotent_call_is_sent_again_after_a_failure(server: Server, bad: tuple[int, str]) -> None:
    server.answers = [bad, bad, (200, "fine")]
    answer = call(server.url)
    assert answer.error and "was not sent again" in answer.text and len(server.requests) == 1
    server.answers = [bad, bad, (200, "fine")]
    assert call(server.url, idempotent=True) == ToolAnswer("fine")
    assert len(server.requests) == 4


def test_a_busy_server_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = [(429, ""), (200, "fine")]
    server.headers_back = {"Retry-After": "7.5"}
    waits, sleep = list[float](), asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    assert call(server.url) == ToolAnswer("fine")
    assert max(waits) == 7.5


def test_a_server_that_is_not_there_is_tried_until_the_time_is_over() -> None:
    with ReservedPorts(1) as reserved:
        answer = call(f"http://127.0.0.1:{reserved.ports[0]}/", timeout_s=3.0)
    assert answer.error and "no connection" in answer.text


def test_a_server_that_does_not_answer(server: Server) -> None:
    server.answers = [(1, "")]
    answer = call(server.url, timeout_s=0.5)
    assert answer.error and "no answer in 0.5 s" in answer.text


def test_a_wait_that_the_server_asks_for_is_bounded_by_the_calls_time(server: Server) -> None:
    server.answers = [(429, "")]
    server.headers_back = {"Retry-After": "100000"}
    answer = call(server.url)
    assert answer.error and "busy" in answer.text and len(server.requests) == 1


def test_an_answer_that_is_too_long(server: Server) -> None:
    server.answers = [(200, "x" * (MAX_RESPONSE + 1))]
    assert call(server.url) == ToolAnswer(f"error: search: its answer is longer than {MAX_RESPONSE} bytes", error=True)
    server.answers = [(200, "x" * 5000)]
    assert len(call(server.url, max_characters=300).text) <= 300


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "ftp://x/"}, "must begin with http"),
        ({"parameters": {"type": "array"}}, "of type object"),
        ({"token": "abc"}, "not the secret itself"),
        ({"token": {"env": "SEARCH_TOKEN_MISSING"}}, "SEARCH_TOKEN_MISSING is not set"),
    ],
)
def test_settings_that_cannot_be_used(wrong: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"url": "http://x/", "description": "", "parameters": PARAMETERS, **wrong}
    with pytest.raises(ValueError, match=message):
        HttpTool("search", **settings)


def test_an_answer_that_is_packed_is_refused(server: Server) -> None:
    """A small one could be unpacked to any size."""
    server.headers_back = {"Content-Encoding": "gzip"}
    answer = call(server.url)
    assert answer.error and "the encoding 'gzip', which was not asked for" in answer.text
