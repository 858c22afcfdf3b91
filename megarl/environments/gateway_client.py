"""The run's client of its gateway: opens a session for a sample, reads its turns, and ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from megarl.common.errors import RolloutError
from megarl.environments.session_rows import SessionTurn, read_turns
from megarl.gateway.request_fields import SessionTerms
from megarl.gateway.token_file import read_gateway_file

logger = logging.getLogger(__name__)

CALL_S = 60.0  # in which the gateway must answer
END_S = 5.0  # the same in a cancelled loop, which must end soon (`rollout/transport/background.py`)
REOPEN_S = 120.0  # in which a dead gateway must be open again
LOOK_S = 0.5


class AttemptLost(RolloutError):  # noqa: N818
    """A process that the sample needs has died: the sample's progress is lost, and it starts again."""


class GatewayLost(AttemptLost):
    """The gateway is unreachable or has lost the session: its process has died, and another one is or will be open."""


class GatewayClient:
    """Calls the gateway of a run; a context manager for the connection."""

    def __init__(self, run_dir: Path) -> None:
        """Raises GatewayLost if no gateway was opened in the run's directory."""
        try:
            content = read_gateway_file(run_dir)
            self.base_url, token_file = content["base_url"], Path(content["token_file"])
            self.token = token_file.read_text().strip()
        except (OSError, ValueError, KeyError) as error:
            raise GatewayLost(f"the address of the gateway cannot be read in {run_dir}: {error}") from error

    async def __aenter__(self) -> GatewayClient:
        """Open the connection."""
        headers = {"Authorization": f"Bearer {self.token}"}
        self._http = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=CALL_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self._http.close()

    async def open(self, session: str, terms: SessionTerms) -> None:
        """Open a session with the terms of its requests. Raises as `turns`."""
        await self._call("PUT", session, msgspec.json.encode(terms))

    async def turns(self, session: str) -> list[SessionTurn]:
        """Return the turns of a session. Raises GatewayLost, and RolloutError with the message of other failures."""
        return read_turns(await self._call("GET", session))

    async def refusal(self, session: str) -> str:
        """Return the code of the bound that a refused request of a session exceeded, or "". Raises as `turns`."""
        return (await self._call("GET", session))["refused"] or ""

    async def end(self, session: str) -> None:
        """End a session if the gateway can be reached; it forgets unused ones anyway.

        A cancelled task waits at most `END_S` seconds.
        """
        task = asyncio.current_task()
        limit_s = END_S if task is not None and task.cancelling() else CALL_S
        try:
            await self._call("DELETE", session, limit_s=limit_s)
        except RolloutError as error:
            logger.info("session %s was not ended: %s", session, error)

    async def _call(self, method: str, session: str, body: bytes | None = None, *, limit_s: float = CALL_S) -> Any:  # noqa: ANN401  # JSON
        url, limit = f"{self.base_url}/sessions/{session}", aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._http.request(method, url, data=body, timeout=limit) as answer:
                content, status = await answer.read(), answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise GatewayLost(
                f"the gateway at {self.base_url} does not answer within {limit_s:.0f} s ({message})"
            ) from error
        if status == 404:
            raise GatewayLost(
                f"the gateway at {self.base_url} has no session {session}: another gateway has replaced that one, or "
                "the session was unused for too long (twice timeouts.generate_s)"
            )
        if status != 200:
            raise RolloutError(
                f"the gateway refused {method} of session {session} ({status}): {content.decode()[:500]}"
            )
        return msgspec.json.decode(content)


async def wait_for_gateway(run_dir: Path, limit_s: float = REOPEN_S) -> None:
    """Wait until the gateway of a run answers. Raises GatewayLost after `limit_s`."""
    until = time.monotonic() + limit_s
    while True:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S)) as http:
                root = read_gateway_file(run_dir)["url"]
                async with http.get(f"{root}/health") as answer:
                    if answer.status == 200:
                        return
                    message = f"it answers with {answer.status}"
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TimeoutError) as error:
            message = f"{type(error).__name__}: {error}"
        if time.monotonic() > until:
            raise GatewayLost(f"a sample waited {limit_s:.0f} s for the gateway of the run to be open again: {message}")
        await asyncio.sleep(LOOK_S)
