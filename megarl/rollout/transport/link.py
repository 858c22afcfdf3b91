"""Small messages between a process and an actor, both ways, batched into few Ray calls.

One call gives messages to the actor, another waits for the actor's. At most one of each runs, so messages arrive in
order, and those that arrive during a call share the next one. A call that may be lost is repeated and counts once. A
Ray call takes as long as 50 short tokens.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from megarl.common.errors import RolloutError
from megarl.rollout.transport.gather import GATHER_S, Outbox, Sent

logger = logging.getLogger(__name__)

Received = TypeVar("Received")

POLL_S = 2.0  # an actor without messages answers after this time
RETRY_S = 0.5  # between calls to an actor that cannot be reached


class LinkLost(RolloutError):  # noqa: N818
    """An actor has died or does not answer."""


def fate_of_actor(error: BaseException) -> Literal["died", "cut", "lives"]:
    """Return the state of an actor whose call raised `error`; `cut`: the call may have reached it.

    Ray's classes are recognized by name, so processes need not import Ray.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"ActorUnavailableError"}:
        return "cut"
    return "died" if kinds & {"ActorDiedError", "RayActorError"} else "lives"


def own_text(error: BaseException) -> str:
    """Return the first line of the actor's error, without Ray's traceback around it."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return lines[0] if lines else ""


# An actor's messages: a number that counts up, the messages, and what the actor waits for, as the end of a sentence.
Parcel: TypeAlias = tuple[int, tuple[Received, ...], str]


class LinkServer(Generic[Sent]):
    """The actor's side. It serves only the newest link and forgets messages for earlier ones."""

    def __init__(
        self, receive: Callable[[Sequence[Any]], Awaitable[None]], under_way: Callable[[], int],
        gather_s: float | None = None, waiting: Callable[[], str] = str,
        begun: Callable[[], object] = lambda: None, pack: Callable[[Sent], Any] = lambda message: message,
        size_of: Callable[[Sent], int] = attrgetter("size"),
    ) -> None:  # fmt: skip
        """`receive`: takes a call's messages. `under_way`, `gather_s`, `size_of`: see `Outbox`.

        `waiting`: see `Parcel`. `begun`: called when a new link begins. `pack`: converts an outbox message when it is
        sent.
        """
        self._receive, self._waiting, self._begun, self._pack = receive, waiting, begun, pack
        self._new_outbox = partial(Outbox[Sent], under_way, GATHER_S if gather_s is None else gather_s, size_of)
        self._begin("")

    def _begin(self, link: str) -> None:
        self._link, self._given = link, 0
        self.outbox: Outbox[Sent] = self._new_outbox()
        self._taking = asyncio.Lock()
        self._taken, self._last = 0, tuple[Any, ...]()  # kept until the link has them, because the call may be lost
        self._begun()

    async def give(self, number: int, messages: Sequence[Any], link: str = "") -> None:
        """Take messages. `number`: of the call; a repeated call counts once. `link`: the link's id."""
        if link != self._link:
            self._begin(link)
        if number > self._given:
            self._given = number
            await self._receive(messages)

    async def take(self, seen: int, wait_s: float, link: str = "") -> Parcel[Any]:
        """Return messages: at once if there are any, otherwise after up to `wait_s`.

        `seen`: the last number the link has; if later messages were lost, they are returned again. Raises RolloutError
        if another link has begun.
        """
        async with self._taking:
            messages = await self.outbox.take(wait_s) if link == self._link and seen == self._taken else None
            if link != self._link:
                raise RolloutError("another controller, or gateway, uses this actor")
            if messages is not None:
                self._last, self._taken = tuple(self._pack(each) for each in messages), seen + 1
            return self._taken, self._last, self._waiting()


class LinkClient(Generic[Sent]):
    """The other side: sends messages and passes on the actor's, from `open` until `close` or the actor's loss."""

    def __init__(
        self, name: str, actor: Any, rpc_s: float, receive: Callable[[Sequence[Any]], Awaitable[None]],  # noqa: ANN401  # Ray does not know the methods of actors
        lost: Callable[[LinkLost], object], under_way: Callable[[], int], *, gather_s: float = GATHER_S,
        link: str = "", polls: Callable[[], bool] = lambda: True, who: str = "the controller",
        size_of: Callable[[Sent], int] = attrgetter("size"),
    ) -> None:  # fmt: skip
        """`actor`: has the methods `give` and `take` of its `LinkServer`. `name`: of the actor, in messages.

        `rpc_s`: how late an answer may be. `lost` is called once, with the cause. `under_way`, `gather_s`, `size_of`:
        see `Outbox`. `link`: an id, for actors that another process may have used. `polls`: whether the actor may have
        answers to what it was given. `who`: this side, in messages.
        """
        self._name, self.actor, self._rpc_s, self._receive, self._lost = name, actor, rpc_s, receive, lost
        self._outbox: Outbox[Sent] = Outbox(under_way, gather_s, size_of)
        self._link = (link,) if link else ()
        self._given, self._is_known = 0, not link  # the actor knows a link once it received something
        self._giving = asyncio.Lock()
        self._polls, self._given_some, self._who = polls, asyncio.Event(), who
        self._drops = 0
        self.waiting = ""  # see `Parcel`
        self._tasks: list[asyncio.Task[None]] = []
        self._is_lost = False

    def open(self) -> None:
        """Start sending and receiving."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watched(each)) for each in (self._give, self._take)]

    def close(self) -> None:
        """Stop sending and receiving."""
        for task in self._tasks:
            task.cancel()

    def send(self, message: Sent) -> None:
        """Send a message soon."""
        self._outbox.put(message)

    async def drop(self) -> None:
        """Discard unsent messages and call the actor's `drop` to make it discard everything; else it is lost."""
        try:
            async with self._giving:  # so that no earlier message arrives later
                self._drops += 1
                self._outbox.clear()
                await self._call("drop", limit_s=self._rpc_s)
        except LinkLost as error:
            self._lose(error)

    async def _watched(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except LinkLost as error:
            self._lose(error)
        except Exception as error:
            logger.exception("%s", self._name)
            self._lose(LinkLost(f"the messages of {self._name} cannot be read: {error!r}"))

    def _lose(self, error: LinkLost) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.close()
            self._lost(error)

    async def _give(self) -> None:
        while True:
            messages, drops = await self._outbox.take(POLL_S), self._drops
            async with self._giving:
                if messages and drops == self._drops:
                    self._given += 1
                    await self._call("give", self._given, messages, *self._link, limit_s=self._rpc_s)
                    self._is_known = True
                    self._given_some.set()

    async def _take(self) -> None:
        seen = 0
        while True:
            while not (self._polls() and self._is_known):
                self._given_some.clear()
                await self._given_some.wait()
            parcel: Parcel[Any] = await self._call("take", seen, POLL_S, *self._link, limit_s=POLL_S + self._rpc_s)
            number, messages, waiting = parcel
            if number != seen:
                seen, self.waiting = number, waiting
                await self._receive(messages)

    async def _call(self, method: str, *args: object, limit_s: float) -> Any:  # noqa: ANN401  # of any method
        """Call an actor method; retry while the actor cannot be reached. Raises LinkLost after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()) as limit:
                    return await getattr(self.actor, method).remote(*args)
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    waited = f"{self._who} waited {limit_s:.0f} s for {self._name} to {method}"
                    raise LinkLost(waited) from None
                if fate_of_actor(error) != "cut":
                    what = f"{type(error).__name__}: {own_text(error)}"
                    raise LinkLost(f"{self._name} has failed: {what}") from error
            logger.warning("%s cannot be reached; trying again", self._name)
            await asyncio.sleep(RETRY_S)
