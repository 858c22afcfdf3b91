"""The calls to the actor of a replica: which of them share a Ray call, and what it means if one fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from megarl.common.errors import ReplicaFailed, RequestFailed
from megarl.rollout.transport.link import LinkLost, fate_of_actor, own_text
from megarl.rollout.transport.rpc import RpcClient

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# Every turn of a loop makes some of these calls, so they share Ray calls; and their order is kept.
_SHARED = frozenset({"generate", "report", "end"})


def as_rollout_error(index: int, method: str, error: BaseException, where: str) -> RequestFailed | ReplicaFailed:
    """Convert what an actor call raised: the replica's own error, which Ray wraps, or the death of the actor.

    `where`: where the replica's log is.
    """
    if isinstance(error, LinkLost) and error.__cause__ is not None:
        error = error.__cause__
    # Ray raises a subclass of the cause's type whose text is the replica's whole traceback: read the cause first.
    cause = getattr(error, "cause", None)
    for own in (cause, error):
        if isinstance(own, RequestFailed):
            return RequestFailed(str(own))
        if isinstance(own, ReplicaFailed):
            return ReplicaFailed(index, f"{own}; {where}")
    if fate_of_actor(error) != "lives":
        return ReplicaFailed(index, f"replica {index} died while it was asked to {method}; {where}")
    kind = type(cause or error).__name__
    return ReplicaFailed(index, f"replica {index} failed to {method}: {kind}: {own_text(error)}; {where}")


class ReplicaClient:
    """Calls the methods of one actor; the actor that replaces it has another client. `where`: where its log is."""

    def __init__(self, index: int, actor: ActorHandle, rpc_s: float, where: str) -> None:
        """`rpc_s`: how late the answers to shared calls may be."""
        self.index, self.actor, self.where = index, actor, where
        self._shared = RpcClient(f"replica {index}", actor, rpc_s)

    def close(self) -> None:
        """Record that the actor is called no more. Calls that wait for it fail when it has ended."""
        self._shared.close()

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call a method and return its result, whose type is the method's.

        Raises RequestFailed for a request that the engine refused, ReplicaFailed for any other failure and after
        `timeout_s`.
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
