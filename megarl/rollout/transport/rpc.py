"""Calls to a replica's methods over a link, and calls to any actor that run exactly once."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.common.errors import EngineMayRun, ReplicaFailed, RequestFailed, RolloutError
from megarl.rollout.transport.gather import Outbox
from megarl.rollout.transport.link import LinkClient, LinkLost, LinkServer, fate_of_actor, own_text

if TYPE_CHECKING:
    from ray.actor import ActorHandle

KEPT = 64  # answers; a client repeats a call only while it waits for it


class AnsweredCalls:
    """Runs each call once and returns its answer to every sender of the same idempotency key.

    A sender that loses the network during a call cannot know whether it ran, so it resends the call.
    """

    def __init__(self, kept: int = KEPT) -> None:
        """`kept`: how many answers to remember, besides running calls."""
        self._kept = kept
        self._calls: dict[str, asyncio.Future[Any]] = {}

    async def answer(self, key: str, run: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ANN401  # of any method
        """Return the answer to the call `key`, or raise what it raised; `run` starts a new call."""
        if (task := self._calls.get(key)) is None:
            task = self._calls[key] = asyncio.ensure_future(run())
            self._forget()
        # The call continues if its caller is cancelled.
        return await asyncio.shield(task)

    def _forget(self) -> None:
        ended = [key for key, task in self._calls.items() if task.done()]
        for key in ended[: max(0, len(ended) - self._kept)]:
            del self._calls[key]


# The link's messages: a call's number, method and arguments; its number, result, error, and the result's size.
Call: TypeAlias = tuple[int, str, tuple[Any, ...]]
Reply: TypeAlias = tuple[int, Any, Exception | None, int]


class RpcServer:
    """The replica's side: runs a link's calls and sends their results."""

    def __init__(
        self, call: Callable[[str, Sequence[Any]], Awaitable[Any]], gather_s: float | None = None,
        size_of: Callable[[str, Any], int] = lambda method, result: 1,
    ) -> None:  # fmt: skip
        """`call`: calls a method of the replica. `gather_s`: see `Outbox`. `size_of`: of a method's result."""
        self._call, self._size_of = call, size_of
        self._tasks: set[asyncio.Future[Any]] = set()
        self.link: LinkServer[Reply] = LinkServer(
            self._begin, lambda: len(self._tasks), gather_s, size_of=lambda reply: reply[3]
        )

    async def _begin(self, calls: Sequence[Call]) -> None:
        """Start calls in their order."""
        for number, method, args in calls:
            task = asyncio.ensure_future(self._call(method, args))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, self.link.outbox, number, method))

    def _ended(self, outbox: Outbox[Reply], number: int, method: str, task: asyncio.Future[Any]) -> None:
        """Send the result to the link that asked for it, identified by its outbox."""
        self._tasks.discard(task)
        if task.cancelled():
            outbox.put((number, None, RolloutError("the call was cancelled in the replica"), 1))
        elif (error := task.exception()) is not None:
            outbox.put((number, None, _sendable(error), 1))
        else:
            outbox.put((number, task.result(), None, self._size_of(method, task.result())))


def _sendable(error: BaseException) -> Exception:
    """Return an error another process can unpickle: a RolloutError, or the text of any other."""
    return error if isinstance(error, RolloutError) else RuntimeError(f"{type(error).__name__}: {error}")


class RpcClient:
    """The controller's side: open calls to one replica. Each caller has its own time limit."""

    def __init__(self, name: str, replica: Any, rpc_s: float) -> None:  # noqa: ANN401  # Ray does not know the methods of actors
        """`replica`: an actor with `RpcServer.link`'s methods. `name`, `rpc_s`: see `LinkClient`."""
        self._name, self._replica, self._rpc_s = name, replica, rpc_s
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._link: LinkClient[Call] | None = None

    async def call(self, method: str, *args: object) -> Any:  # noqa: ANN401  # of any method
        """Return what the method returns. Raises what it raises, and LinkLost if the replica died or hangs."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = future
        if self._link is None:
            self._link = LinkClient(
                self._name, self._replica, self._rpc_s, self._settle, self._lose, lambda: len(self._open),
                gather_s=0.0, link=uuid.uuid4().hex, polls=lambda: bool(self._open), size_of=lambda call: 1,
            )  # fmt: skip
            self._link.open()
        self._link.send((number, method, args))
        try:
            return await future
        finally:
            self._open.pop(number, None)

    def close(self) -> None:
        """End the link if no calls are open; otherwise it ends with the actor."""
        if self._link is not None and not self._open:
            self._link.close()
            self._link = None

    async def _settle(self, replies: Sequence[Reply]) -> None:
        for number, result, error, _ in replies:
            future = self._open.get(number)
            if future is None or future.done():  # nobody awaits it
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _lose(self, error: LinkLost) -> None:
        """Raise the loss in all open calls; the next call opens another link."""
        self._link = None
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)


# Every loop turn makes some of these calls, so they share Ray calls and stay in order.
_SHARED = frozenset({"generate", "report", "end"})


def as_rollout_error(index: int, method: str, error: BaseException, where: str) -> RequestFailed | ReplicaFailed:
    """Convert what an actor call raised: the replica's error, wrapped by Ray, or the actor's death.

    `where`: where the replica's log is.
    """
    if isinstance(error, LinkLost) and error.__cause__ is not None:
        error = error.__cause__
    # Ray raises a subclass of the cause's type with the replica's whole traceback as text, so read the cause first.
    cause = getattr(error, "cause", None)
    for own in (cause, error):
        if isinstance(own, RequestFailed):
            return RequestFailed(str(own))
        if isinstance(own, ReplicaFailed):
            kind = EngineMayRun if isinstance(own, EngineMayRun) else ReplicaFailed
            return kind(index, f"{own}; {where}")
    if fate_of_actor(error) != "lives":
        return ReplicaFailed(index, f"replica {index} died while it was asked to {method}; {where}")
    name = type(cause or error).__name__
    return ReplicaFailed(index, f"replica {index} failed to {method}: {name}: {own_text(error)}; {where}")


class ReplicaClient:
    """Calls one actor's methods; a replacement gets another client. `where`: where its log is."""

    def __init__(self, index: int, actor: ActorHandle, rpc_s: float, where: str) -> None:
        """`rpc_s`: how late answers to shared calls may be."""
        self.index, self.actor, self.where = index, actor, where
        self._shared = RpcClient(f"replica {index}", actor, rpc_s)

    def close(self) -> None:
        """Note that the actor gets no more calls. Open calls fail when it ends."""
        self._shared.close()

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call a method and return its result.

        Raises RequestFailed if the engine refused a request, ReplicaFailed for any other failure and after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if method in _SHARED:
                    return await self._shared.call(method, *args)
                return await getattr(self.actor, method).remote(*args)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                waited = f"waited {timeout_s:.0f} s for replica {self.index} to {method}; {self.where}"
                raise ReplicaFailed(self.index, waited) from None
            raise as_rollout_error(self.index, method, error, self.where) from error
