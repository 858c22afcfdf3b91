"""Calls that a client may send several times and that run once: an idempotency key names each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

KEPT = 64  # answers; a client sends a call again only as long as it waits for that call


class AnsweredCalls:
    """Runs each call once, and gives its answer to everyone who sends the same key.

    If the network is cut while a call is on its way, its sender cannot know whether it has run. It sends it again.
    """

    def __init__(self, kept: int = KEPT) -> None:
        """`kept`: the number of answers that are remembered, besides those of calls that still run."""
        self._kept = kept
        self._calls: dict[str, asyncio.Task[Any]] = {}

    async def answer(self, key: str, run: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401  # of any method
        """Return the answer to the call `key`, or raise what it raised; `run` starts it if it is new."""
        if (task := self._calls.get(key)) is None:
            task = self._calls[key] = asyncio.get_running_loop().create_task(_coroutine(run))
            self._forget()
        # The call goes on if the one who waits for its answer is cancelled.
        return await asyncio.shield(task)

    def _forget(self) -> None:
        ended = [key for key, task in self._calls.items() if task.done()]
        for key in ended[: max(0, len(ended) - self._kept)]:
            del self._calls[key]


def _coroutine(run: Callable[[], Awaitable[Any]]) -> Coroutine[Any, Any, Any]:
    async def awaited() -> Any:  # noqa: ANN401  # of any method
        return await run()

    return awaited()
