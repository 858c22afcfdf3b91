"""Batches small items in one call: those of one event loop turn, or messages up to a size limit.

A call between processes costs as much as 20 messages.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

from megarl.common.errors import RolloutError

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Turn(Generic[Item, Answer]):
    """One call for everyone who joins in the current event loop turn; `task` makes it in the next turn."""

    def __init__(self, call: Callable[[list[Item]], Awaitable[Sequence[Answer]]]) -> None:
        """`call`: returns the answers to the joined items, in order."""
        self.joined: list[Item] = []
        self.open = True
        self.task = asyncio.get_running_loop().create_task(self._make(call))

    async def _make(self, call: Callable[[list[Item]], Awaitable[Sequence[Answer]]]) -> Sequence[Answer]:
        self.open = False
        return await call(self.joined)

    async def join(self, asked: Item) -> Answer:
        """Join the call while it is `open`, and return the answer. Raises what the call raises."""
        position = len(self.joined)
        self.joined.append(asked)
        return (await asyncio.shield(self.task))[position]  # the others still wait if this one is cancelled


Sent = TypeVar("Sent")

# Seconds between two calls. They grow with the number of running loops: with thousands, a turn takes seconds, and few
# messages would arrive within the minimum.
GATHER_S, GATHER_EACH_S, MOST_GATHER_S = 0.005, 4e-5, 0.2
# Limits of one call, so that it blocks neither side for long: reading 200,000 numbers takes about 10 ms. The rest waits
# for the next call.
MOST_MESSAGES, MOST_SIZE = 512, 200_000


def gathering_s(under_way: int) -> float:
    """Return how long to gather messages while `under_way` senders wait for an answer."""
    return min(MOST_GATHER_S, GATHER_EACH_S * under_way)


class Outbox(Generic[Sent]):
    """Keeps messages in order until a call takes them."""

    def __init__(
        self, under_way: Callable[[], int] = int, gather_s: float = GATHER_S,
        size_of: Callable[[Sent], int] = attrgetter("size"),
    ) -> None:  # fmt: skip
        """`under_way`: returns how many wait for messages; the time between calls grows with it.

        `gather_s`: the minimum time between two calls, in which messages gather. `size_of`: returns roughly how many
        numbers a message has.
        """
        self._under_way, self._gather_s, self._size_of = under_way, gather_s, size_of
        self._waiting: deque[Sent] = deque()
        self._size = 0  # of the waiting messages
        self._some, self._full = asyncio.Event(), asyncio.Event()
        self._next_at = 0.0

    def put(self, message: Sent) -> None:
        """Add a message."""
        self._waiting.append(message)
        self._size += self._size_of(message)
        self._some.set()
        self._note_full()

    async def take(self, wait_s: float) -> list[Sent]:
        """Wait up to `wait_s` for a message, gather more up to the limits of a call, and return them."""
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
            size += self._size_of(first[-1])
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


class BatchDecoder:
    """Decodes all responses that end in one event loop turn together, in another thread.

    Decoding is the longest work per response, and the tokenizer releases the GIL.
    """

    def __init__(self, decode_all: Callable[[Sequence[Sequence[int]]], list[str]], timeout_s: float) -> None:
        """`decode_all`: returns texts in the order of its arguments. `timeout_s`: per text (`timeouts.rpc_s`)."""
        self._decode_all, self._timeout_s = decode_all, timeout_s
        self._turn: Turn[Sequence[int], str] | None = None

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises what `decode_all` raises, and RolloutError after `timeout_s`."""
        if self._turn is None or not self._turn.open:
            self._turn = Turn(self._decode)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._turn.join(ids)
        except TimeoutError as error:
            if not limit.expired():  # `decode_all` has raised it
                raise
            raise RolloutError(
                f"a response of {len(ids)} tokens waited {self._timeout_s:g} s (timeouts.rpc_s) for a thread of the "
                "controller to decode it; give that process more of a core, or raise the bound"
            ) from error

    async def _decode(self, sequences: list[Sequence[int]]) -> list[str]:
        return await asyncio.get_running_loop().run_in_executor(None, self._decode_all, sequences)
