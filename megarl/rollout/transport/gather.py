"""What goes together in one call: what comes in one turn of the event loop, or messages of a bounded size.

A call between processes costs as much as 20 messages. One that was lost is made again, and counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

from megarl.common.errors import RolloutError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Turn(Generic[Asked, Answer]):
    """One call for all that join in the present turn of the event loop; `task` makes it in the next one."""

    def __init__(self, call: Callable[[list[Asked]], Awaitable[Sequence[Answer]]]) -> None:
        """`call`: returns the answers to what has joined, in the order of it."""
        self.joined: list[Asked] = []
        self.open = True
        self.task = asyncio.get_running_loop().create_task(self._make(call))

    async def _make(self, call: Callable[[list[Asked]], Awaitable[Sequence[Answer]]]) -> Sequence[Answer]:
        self.open = False
        return await call(self.joined)

    async def join(self, asked: Asked) -> Answer:
        """Return the answer to something that is asked while this is `open`. Raises what the call has raised."""
        position = len(self.joined)
        self.joined.append(asked)
        return (await asyncio.shield(self.task))[position]  # the others wait on if this one is cancelled


Sent = TypeVar("Sent")

# Between two calls. Where thousands of loops are under way, the turn of
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

    def __init__(
        self, under_way: Callable[[], int] = int, gather_s: float = GATHER_S,
        size_of: Callable[[Sent], int] = attrgetter("size"),
    ) -> None:  # fmt: skip
        """`under_way`: the number of those who wait for messages, by which the time between two calls grows.

        `gather_s`: the shortest time between two calls, in which messages gather. `size_of`: returns about how many
        numbers a message has.
        """
        self._under_way, self._gather_s, self._size_of = under_way, gather_s, size_of
        self._waiting: deque[Sent] = deque()
        self._size = 0  # of those that wait
        self._some, self._full = asyncio.Event(), asyncio.Event()
        self._next_at = 0.0

    def put(self, message: Sent) -> None:
        """Add a message."""
        self._waiting.append(message)
        self._size += self._size_of(message)
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


# Decoding of responses: those that end in one turn of the event loop are decoded together, in another thread.
#
# Decoding takes longer than all else that is done for a response, and the library lets other threads run meanwhile.


class BatchDecoder:
    """Collects token ids for the function `decode_all`, which returns their texts in order."""

    def __init__(self, decode_all: Callable[[Sequence[Sequence[int]]], list[str]], timeout_s: float) -> None:
        """`timeout_s`: the longest time that a text may take, `timeouts.rpc_s` of the config."""
        self._decode_all, self._timeout_s = decode_all, timeout_s
        self._turn: Turn[Sequence[int], str] | None = None

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids.

        Raises what `decode_all` raises for the turn's token ids, and RolloutError if no text comes in time.
        """
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
