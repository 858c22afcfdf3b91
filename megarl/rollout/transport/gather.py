"""Messages that wait to be sent, and go together in calls of bounded size."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Anything that is sent."""

    @property
    def size(self) -> int:
        """About how many numbers it has."""
        ...


Sent = TypeVar("Sent", bound=Sized)

# Between two calls: a call costs a process as much as 20 messages. Where thousands of loops are under way, the turn of
# each of them takes seconds, and their messages would hardly ever meet within the shortest time.
GATHER_S, GATHER_EACH_S, MOST_GATHER_S = 0.005, 4e-5, 0.2
# Of one call, so that neither side is busy with it for long: 200,000 numbers are read in about 10 ms. Calls follow each
# other: what does not fit into one waits for the next.
MOST_MESSAGES, MOST_SIZE = 512, 200_000


def gathering_s(under_way: int) -> float:
    """Return how long messages may gather where so many wait for an answer to theirs."""
    return min(MOST_GATHER_S, GATHER_EACH_S * under_way)


class Outbox(Generic[Sent]):
    """Keeps messages in their order until a call takes them."""

    def __init__(self, under_way: Callable[[], int] = int, gather_s: float = GATHER_S) -> None:
        """`under_way`: the number of those who wait for messages, by which the time between two calls grows.

        `gather_s`: the shortest time between two calls, in which messages gather.
        """
        self._under_way, self._gather_s = under_way, gather_s
        self._waiting: deque[Sent] = deque()
        self._size = 0  # of those that wait
        self._some, self._full = asyncio.Event(), asyncio.Event()
        self._next_at = 0.0

    def put(self, message: Sent) -> None:
        """Add a message."""
        self._waiting.append(message)
        self._size += message.size
        self._some.set()
        self._note_full()

    async def take(self, wait_s: float) -> list[Sent]:
        """Return the first messages; wait until there is one, `wait_s` at most.

        Others gather meanwhile, but not more than one call takes.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._some.wait()
        if (early_s := self._next_at - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(early_s):
                    await self._full.wait()
        self._next_at = time.monotonic() + max(self._gather_s, gathering_s(self._under_way()))
        return self._first()

    def _first(self) -> list[Sent]:
        first: list[Sent] = []
        size = 0
        while self._waiting and len(first) < MOST_MESSAGES and (not first or size < MOST_SIZE):
            first.append(self._waiting.popleft())
            size += first[-1].size
        self._size -= size
        if not self._waiting:
            self._some.clear()
        self._note_full()
        return first

    def _note_full(self) -> None:
        if len(self._waiting) >= MOST_MESSAGES or self._size >= MOST_SIZE:
            self._full.set()
        else:
            self._full.clear()

    def clear(self) -> None:
        """Forget all messages."""
        self._waiting.clear()
        self._size = 0
        self._some.clear()
        self._full.clear()
