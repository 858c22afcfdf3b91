"""Calls of a replica that share Ray calls: one Ray call brings those made in one turn of the controller's event loop,
where thousands are open those of some hundredths of a second, and another one, always open while any of them is, takes
the answers that have come.

A Ray call costs as much time as 50 short tokens, and every later turn of an agent is a call by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.common.errors import RolloutError
from megarl.rollout.transport.gather import Outbox, Replay, gathering_s

# Calls that a client may send several times and that run once: an idempotency key names each of them.

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


POLL_S = 2.0  # the longest time for which a replica without answers lets the controller wait


@dataclass(frozen=True)
class SharedCall:
    """A call of a method of the replica."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class CallResult:
    """The result of a call, or the error that it has raised. `size`: about how many numbers `result` has."""

    number: int
    result: Any
    error: Exception | None
    size: int = 1


Answers = tuple[int, list[CallResult]]  # what the replica had answered when it was asked, and its number


class RpcServer:
    """The replica's side. It serves one link, that of the newest controller, and forgets calls of the one before."""

    def __init__(
        self, call: Callable[[str, Sequence[Any]], Awaitable[Any]], outbox: Callable[..., Outbox[CallResult]] = Outbox
    ) -> None:
        """`call`: calls a method of the replica. `outbox`: makes what keeps the answers to one link."""
        self._call, self._new_outbox = call, partial(outbox, lambda: len(self._tasks))
        self._link = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outbox = self._new_outbox()
        self._replay: Replay[list[CallResult]] = Replay([])

    def begin(self, link: str, calls: Sequence[SharedCall]) -> None:
        """Start calls in their order. `link`: the id of the one that sends them."""
        if link != self._link:
            self._link, self._outbox, self._replay = link, self._new_outbox(), Replay([])
        for each in calls:
            task = asyncio.ensure_future(self._call(each.method, each.args))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, link, each.number))

    async def take(self, link: str, seen: int, wait_s: float) -> Answers:
        """Return answers: at once if there are any, after `wait_s` at the latest.

        `seen`: the number of the last ones that the link has; later ones were lost on their way, and are repeated.
        Raises RolloutError if another link has begun.
        """
        if link != self._link:
            raise RolloutError("another controller uses this replica")
        answers = await self._replay.take(seen, partial(self._outbox.take, wait_s))
        if link != self._link:
            raise RolloutError("another controller has begun to use this replica")
        return answers

    def _ended(self, link: str, number: int, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)  # type: ignore[arg-type]
        if task.cancelled():
            answer = CallResult(number, None, RolloutError("the call was cancelled in the replica"))
        elif (error := task.exception()) is not None:
            answer = CallResult(number, None, _sendable(error))
        else:
            answer = CallResult(number, task.result(), None, getattr(task.result(), "size", 1))
        if link == self._link:
            self._outbox.put(answer)


def _sendable(error: BaseException) -> Exception:
    """Return an error that another process can read: our own ones, and the text of others."""
    return error if isinstance(error, RolloutError) else RuntimeError(f"{type(error).__name__}: {error}")


class RpcClient:
    """The controller's side: the calls of one replica that wait for an answer. Each caller has its own time limit."""

    def __init__(self, replica: Any, grace_s: float) -> None:  # noqa: ANN401  # Ray does not know the methods of actors
        """`replica`: an actor with `begin_calls` and `take_answers`, those of its `RpcServer`.

        `grace_s`: how long answers may be late until they are asked for again.
        """
        self.replica = replica
        self._grace_s = grace_s
        self._id = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._unsent: list[SharedCall] = []
        self._seen = 0
        self._next_at = 0.0  # by the clock of the event loop; until then calls gather
        self._sending: asyncio.Future[Any] | None = None
        self._taking: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: object) -> Any:  # noqa: ANN401  # of any method
        """Return what the method returns. Raises what it raised, or what a Ray call of this link has raised."""
        loop = asyncio.get_running_loop()
        number, future = next(self._numbers), loop.create_future()
        self._open[number] = future
        if not self._unsent:
            self._send_soon(loop)
        self._unsent.append(SharedCall(number, method, args))
        try:
            return await future
        finally:
            self._open.pop(number, None)

    def _send_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what is to be sent when the time to gather is over."""
        if (early_s := self._next_at - loop.time()) > 0:
            loop.call_later(early_s, self._send)
        else:
            loop.call_soon(self._send)

    def _send(self) -> None:
        """Send also calls whose callers have gone: a later one can depend on them.

        One Ray call at a time, and answers are asked for when it has ended: an asynchronous actor starts those whose
        arguments are small before those whose arguments are large.
        """
        if self._sending is not None or not self._unsent:
            return
        calls, self._unsent = self._unsent, []
        self._next_at = asyncio.get_running_loop().time() + gathering_s(len(self._open))
        try:
            sending = asyncio.ensure_future(self.replica.begin_calls.remote(self._id, calls))
        except Exception as error:  # a handle of an actor that cannot be called any more
            self._fail(error)
            return
        self._sending = sending
        sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Future[Any]) -> None:
        self._sending = None
        if sending.cancelled():  # the loop ends: a call that is begun now would never run
            return
        if (error := sending.exception()) is not None:
            self._fail(error)
        elif self._taking is None or self._taking.done():
            self._taking = asyncio.get_running_loop().create_task(self._take())
        if self._unsent:
            self._send_soon(asyncio.get_running_loop())

    async def _take(self) -> None:
        while self._open:
            try:
                async with asyncio.timeout(POLL_S + self._grace_s) as limit:
                    number, answers = await self.replica.take_answers.remote(self._id, self._seen, POLL_S)
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    continue  # the callers know how long they wait for a replica that says nothing
                self._fail(error)
                return
            if number != self._seen:
                self._seen = number
                for answer in answers:
                    self._settle(answer)

    def _settle(self, answer: CallResult) -> None:
        future = self._open.get(answer.number)
        if future is None or future.done():  # nobody waits for it any more
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.result)

    def _fail(self, error: BaseException) -> None:
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
