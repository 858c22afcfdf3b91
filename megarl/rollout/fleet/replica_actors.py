"""The actors of the replicas, and the calls to them: which calls share a Ray call, and what it means if one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megarl.common.errors import ReplicaFailed, RequestFailed
from megarl.rollout.transport.rpc import RpcClient

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# Tells from the failure of a call to a replica's actor what has happened to the replica.


def as_rollout_error(index: int, method: str, error: Exception, where: str) -> RequestFailed | ReplicaFailed:
    """Convert what an actor call raised: the replica's own error, which Ray wraps, or the death of the actor.

    `where`: where the replica's log is.
    """
    # Ray raises a subclass of the cause's type whose text is the replica's whole traceback: read the cause first.
    cause = getattr(error, "cause", None)
    for own in (cause, error):
        if isinstance(own, RequestFailed):
            return RequestFailed(str(own))
        if isinstance(own, ReplicaFailed):
            return ReplicaFailed(index, f"{own}; {where}")
    if "ActorDied" in type(error).__name__ or "ActorUnavailable" in type(error).__name__:
        return ReplicaFailed(index, f"replica {index} died while it was asked to {method}; {where}")
    detail = str(cause or error).strip().splitlines()
    return ReplicaFailed(
        index,
        f"replica {index} failed to {method}: {type(cause or error).__name__}: {detail[0] if detail else ''}; {where}",
    )


# Every turn of a loop makes some of these calls, so they share Ray calls; and their order is kept.
_SHARED = frozenset({"generate", "report", "end"})


class ReplicaActors:
    """Holds the actor of each replica of the pool, lost ones included, and calls its methods.

    `by_index`: the actors. A replica that is restarted has another one under the same index. `describe(index)`: where
    a replica's log is.
    """

    def __init__(self, replicas: Mapping[int, ActorHandle], rpc_s: float, describe: Callable[[int], str] = str) -> None:
        """`rpc_s`: how late the answers to shared calls may be until they are asked for again."""
        self.by_index = dict(replicas)
        self._rpc_s, self.describe = rpc_s, describe
        self._links: dict[int, RpcClient] = {}

    async def call(self, index: int, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call one method of one replica and return its result, whose type is the method's.

        Raises RequestFailed for a request that the engine refused, ReplicaFailed for any other failure and after
        `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if method in _SHARED:
                    return await self.link(index).call(method, *args)
                return await getattr(self.by_index[index], method).remote(*args)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise self._late(index, method, timeout_s) from None
            raise self.failure(index, method, error) from error

    def link(self, index: int) -> RpcClient:
        """Return the link by which the shared calls of a replica are made; its calls have no time limit."""
        link, replica = self._links.get(index), self.by_index[index]
        if link is None or link.replica is not replica:
            link = self._links[index] = RpcClient(replica, self._rpc_s)
        return link

    def _late(self, index: int, method: str, waited_s: float) -> ReplicaFailed:
        return ReplicaFailed(index, f"waited {waited_s:.0f} s for replica {index} to {method}; {self.describe(index)}")

    def failure(self, index: int, method: str, error: Exception) -> RequestFailed | ReplicaFailed:
        """Return what a failed call means; see `as_rollout_error`."""
        return as_rollout_error(index, method, error, self.describe(index))

    def remove(self, index: int) -> ActorHandle:
        """Forget a replica; return its actor."""
        self._links.pop(index, None)
        return self.by_index.pop(index)
