"""RolloutPool: the replicas as one thing that generates. Lives in the controller (and in `megarl eval`).

Requests of a group go to one replica in one call. A replica that dies is taken out and its requests are sampled anew
elsewhere, with the same seeds; without another replica the failure is raised, naming it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from megarl.common.errors import NoReplicaLeft, ReplicaFailed, RolloutError
from megarl.rollout.requests import GenerateRequest, GenerateResult
from megarl.rollout.routing import Router

logger = logging.getLogger(__name__)


class RolloutPool:
    def __init__(self, replicas: Mapping[int, Any], *, timeout_s: float, describe: Callable[[int], str] = str) -> None:
        """`replicas`: index -> actor handle with EngineReplica's methods. `describe(index)`: where its log is."""
        self._replicas = dict(replicas)
        self._router = Router(self._replicas)
        self._describe = describe
        self.timeout_s = timeout_s
        self.dead: dict[int, ReplicaFailed] = {}

    @property
    def alive(self) -> list[int]:
        return sorted(self._router.load)

    def handle(self, index: int) -> Any:
        return self._replicas[index]

    async def generate(
        self, prefix: Hashable, requests: Sequence[GenerateRequest], *, home: int | None = None
    ) -> list[GenerateResult]:
        """Responses in the order of `requests`. NoReplicaLeft if the last replica failed, RolloutError on a time-out.

        `home`: a number that alone decides which of the living replicas takes them, instead of their load.
        """
        while True:
            index = self._router.assign(prefix, len(requests), home)
            try:
                return await self.call(index, "generate", list(requests), timeout_s=self.timeout_s)
            except ReplicaFailed as error:
                self.remove(index, error)
                logger.warning("sampling %d requests anew: %s", len(requests), error)
            finally:
                self._router.finish(prefix, index, len(requests))

    async def call(self, index: int, method: str, *args: Any, timeout_s: float) -> Any:
        """One method of one replica; everything that goes wrong leaves as ReplicaFailed or a RolloutError."""
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
        """Send nothing more to it. NoReplicaLeft, with the same message, if it was the last."""
        if index in self.dead:
            return
        if self.alive == [index]:
            raise NoReplicaLeft(index, str(reason)) from reason
        self.dead[index] = reason
        self._router.remove(index)

    def replace(self, index: int, handle: Any) -> None:
        """A fresh replica under the same index; it serves after `admit`."""
        if index in self._router.load and self.alive != [index]:
            self._router.remove(index)
        self._replicas[index] = handle

    def admit(self, index: int) -> None:
        """The (re)started replica holds the current weights: let it serve."""
        self.dead.pop(index, None)
        if index not in self._router.load:
            self._router.add(index)


def as_replica_failure(index: int, method: str, error: Exception, where: str) -> ReplicaFailed:
    """What an actor call raised, as ReplicaFailed; Ray wraps the replica's own error, or says that the actor died."""
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
