"""A tool on another machine: a call is a POST of JSON, repeated within its time if that is safe."""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx

from megarl.common.trust.secret_references import resolved
from megarl.tools.tool import MAX_CHARACTERS, MAX_IMAGE_BYTES, ToolAnswer, answer_of, bounded

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
MAX_RESPONSE = 1 << 20  # bytes, without images
_BUSY = 429


@dataclass(frozen=True)
class _Failed:
    """A try without an answer. `sent`: the server may have acted on it. `pause_s`: the wait it asked for."""

    message: str
    sent: bool
    pause_s: float = 0.0


class HttpTool:
    """The tool at `url`.

    A call sends `{"name": ..., "arguments": {...}}`. The answer is a JSON object with `text`, and with `error` if it is
    one; any other answer is the text itself. With `images` it may also be a list of chat parts with images as data URLs
    (`answer_of`). `token`: `{env: NAME}`, the variable of a bearer token. A call that may have reached the server is
    repeated only if the tool is `idempotent`; one that did not, or got status 429, always. Redirects are not followed,
    and proxies of the environment are not used. Raises ValueError for an invalid setting.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        description: str,
        parameters: Mapping[str, Any],
        token: Mapping[str, str] | None = None,
        idempotent: bool = False,
        images: bool = False,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"the tool {name!r}: url is {url!r}, and must begin with http:// or https://")
        if parameters.get("type") != "object":
            raise ValueError(f"the tool {name!r}: parameters must be a JSON schema of type object")
        if isinstance(token, str):
            raise ValueError(f"the tool {name!r}: token must be {{env: NAME}}, not the secret itself")
        self.name, self.description, self.idempotent = name, description, idempotent
        self.parameters = dict(parameters)
        self._url, self._max_characters, self._images = address, max_characters, images
        self._most = MAX_RESPONSE + (MAX_IMAGE_BYTES * 4 // 3 if images else 0)  # in base64
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}  # the bound is on the bytes sent
        if token is not None:
            headers["Authorization"] = f"Bearer {resolved({'token': token}, f'tool {name}')['token']}"
        self._client = httpx.AsyncClient(headers=headers, trust_env=False, follow_redirects=False)

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Send the call until there is an answer, it must not be sent again, or the time is up."""
        deadline = time.monotonic() + timeout_s
        pause, tries, last = FIRST_PAUSE_S, 0, "no try was made"
        while True:
            tries += 1
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    outcome = await self._send(arguments)
            except TimeoutError:
                return self._error(f"no answer in {timeout_s:g} s (try {tries}; before: {last})")
            if isinstance(outcome, ToolAnswer):
                return outcome
            last = outcome.message
            if outcome.sent and not self.idempotent:
                return self._error(f"{last}; it may have been done, so it was not sent again")
            wait = max(pause, outcome.pause_s)
            if time.monotonic() + wait >= deadline:
                return self._error(f"{last} ({tries} tries in {timeout_s:g} s)")
            await asyncio.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _send(self, arguments: Mapping[str, Any]) -> ToolAnswer | _Failed:  # noqa: PLR0911  # one per outcome
        """Send the call once."""
        content = {"name": self.name, "arguments": dict(arguments)}
        try:
            async with self._client.stream("POST", self._url, json=content, timeout=None) as response:
                if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    return self._error(f"its answer has the encoding {coding[:40]!r}, which was not asked for")
                body = bytearray()
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > self._most:
                        return self._error(f"its answer is longer than {self._most} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            return _Failed(f"no connection: {type(error).__name__}", sent=False)
        except httpx.HTTPError as error:
            return _Failed(f"the connection failed: {type(error).__name__}", sent=True)
        if response.status_code == _BUSY:
            return _Failed("it is busy (status 429)", sent=False, pause_s=_seconds(response.headers.get("Retry-After")))
        if response.status_code >= 500:
            return _Failed(f"status {response.status_code}", sent=True)
        if self._images:  # up to 33 MB of base64: other samples' calls go on meanwhile
            return await asyncio.to_thread(self._read, response.status_code, body)
        return self._read(response.status_code, body)

    def _read(self, status: int, body: bytearray) -> ToolAnswer:
        text = body.decode("utf-8", "replace")
        if not 200 <= status < 300:
            return self._error(f"status {status}: {text[:500]}")
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            return ToolAnswer(bounded(text, self._max_characters))
        if isinstance(answer, dict) and isinstance(answer.get("text"), str):
            return ToolAnswer(bounded(answer["text"], self._max_characters), answer.get("error") is True)
        if self._images and isinstance(answer, list):
            return self._shown(answer)
        return ToolAnswer(bounded(text, self._max_characters))

    def _shown(self, parts: list[object]) -> ToolAnswer:
        try:
            answer = answer_of(parts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return self._error(f"its answer has chat parts that cannot be used: {type(error).__name__}: {error}")
        return replace(answer, text=bounded(answer.text, self._max_characters))

    def _error(self, message: str) -> ToolAnswer:
        return ToolAnswer(bounded(f"error: {self.name}: {message}", self._max_characters), error=True)


def _seconds(header: str | None) -> float:
    """Return the seconds of a Retry-After; 0 for a date, which depends on the server's clock."""
    try:
        seconds = float(header or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
