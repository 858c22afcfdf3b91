"""RolloutPool: generates on all serving replicas. It runs in the controller.

The requests of one call go to one replica. If a replica dies, it is removed and its requests are sampled again on
another one, with the same seeds; if it was the last one, its failure is raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.common.errors import NoReplicaLeft, ReplicaFailed, RolloutError
from megarl.rollout.requests import GenerateRequest, GenerateResult
from megarl.rollout.routing import Router

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


class RolloutPool:
    """Routes requests to the replicas that serve; `dead` holds why the others were removed."""

    def __init__(
        self, replicas: Mapping[int, ActorHandle], *, timeout_s: float, describe: Callable[[int], str] = str
    ) -> None:
        """`replicas`: EngineReplica actors by index. `timeout_s`: bound of one `generate`.

        `describe(index)`: where the replica's log is, for messages.
        """
        self._replicas = dict(replicas)
        self._router = Router(self._replicas)
        self._describe = describe
        self.timeout_s = timeout_s
        self.dead: dict[int, ReplicaFailed] = {}

    @property
    def alive(self) -> list[int]:
        """Indices of the replicas that serve, sorted."""
        return sorted(self._router.load)

    def handle(self, index: int) -> ActorHandle:
        """Return the actor of a replica, whether it serves or not."""
        return self._replicas[index]

    async def generate(
        self, prefix: Hashable, requests: Sequence[GenerateRequest], *, home: int | None = None
    ) -> list[GenerateResult]:
        """Return responses in the order of `requests`. `prefix` and `home`: see `Router.assign`.

        Raises NoReplicaLeft if the last replica failed, RolloutError after `timeout_s`.
        """
        while True:
            index = self._router.assign(prefix, len(requests), home)
            try:
                return await self.call(index, "generate", list(requests), timeout_s=self.timeout_s)
            except ReplicaFailed as error:
                self.remove(index, error)
                logger.warning("sampling %d requests again: %s", len(requests), error)
            finally:
                self._router.finish(prefix, index, len(requests))

    async def call(self, index: int, method: str, *args: Any, timeout_s: float) -> Any:
        """Call one method of one replica and return its result, whose type is the method's.

        Raises RolloutError after `timeout_s`, ReplicaFailed for any other failure.
        """
        reference = getattr(self._replicas[index], method).remote(*args)
        try:
            return await asyncio.wait_for(reference, timeout_s)
        except TimeoutError:
            raise RolloutError(
                f"waited {timeout_s:.0f} s for replica {index} to {method}; {self._describe(index)}"
            ) from None
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise as_replica_failure(index, method, error, self._describe(index)) from error

    def remove(self, index: int, reason: ReplicaFailed) -> None:
        """Send nothing more to a replica. Raises NoReplicaLeft, with the message of `reason`, if it is the last one."""
        if index in self.dead:
            return
        if self.alive == [index]:
            raise NoReplicaLeft(index, str(reason)) from reason
        self.dead[index] = reason
        self._router.remove(index)

    def replace(self, index: int, handle: ActorHandle) -> None:
        """Put a new replica in the place of an old one; it serves after `admit`."""
        if index in self._router.load and self.alive != [index]:
            self._router.remove(index)
        self._replicas[index] = handle

    def admit(self, index: int) -> None:
        """Let a replica serve. Call it when the replica holds the current weights."""
        self.dead.pop(index, None)
        if index not in self._router.load:
            self._router.add(index)


def as_replica_failure(index: int, method: str, error: Exception, where: str) -> ReplicaFailed:
    """Convert what an actor call raised: the replica's own error, which Ray wraps, or the death of the actor.

    `where`: where the replica's log is.
    """
    cause = getattr(error, "cause", None)
    if isinstance(error, ReplicaFailed) or isinstance(cause, ReplicaFailed):
        own = cause if isinstance(cause, ReplicaFailed) else error
        return ReplicaFailed(index, f"{own}; {where}")
    if "ActorDied" in type(error).__name__ or "ActorUnavailable" in type(error).__name__:
        return ReplicaFailed(index, f"replica {index} died while it was asked to {method}; {where}")
    detail = str(cause or error).strip().splitlines()
    return ReplicaFailed(
        index,
        f"replica {index} failed to {method}: {type(cause or error).__name__}: {detail[0] if detail else ''}; {where}",
    )
