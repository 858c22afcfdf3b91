"""The replicas of a run: which exist, which serve, and how lost ones are replaced.

The config gives the number of replicas at the start. After that only the fleet knows how many there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.common.errors import RolloutError
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.devices import HeldDevices
from megarl.rollout.pool import RolloutPool
from megarl.rollout.replica import ReplicaSpec, replica_name, restart_replica

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


class Fleet:
    """Holds all replicas (`members`), lost and joining ones included, and the `pool` of those that serve."""

    def __init__(self, spec: ReplicaSpec, replicas: dict[int, ActorHandle], timeouts: TimeoutsConfig) -> None:
        """`replicas`: started EngineReplica actors by index."""
        self._spec, self._timeouts = spec, timeouts
        self._joining: set[int] = set()
        self._members = set(replicas)
        self.pool = RolloutPool(replicas, timeout_s=timeouts.generate_s, describe=self._where_its_log_is)

    @classmethod
    async def attach(cls, spec: ReplicaSpec, count: int, timeouts: TimeoutsConfig) -> Fleet:
        """Wait until the `count` replicas of the run's start exist.

        Raises RolloutError naming the first that does not within `timeouts.engine_start_s`.
        """
        import ray

        replicas: dict[int, ActorHandle] = {}
        deadline = time.monotonic() + timeouts.engine_start_s
        while len(replicas) < count:
            index = len(replicas)
            try:
                replicas[index] = ray.get_actor(replica_name(index), namespace=spec.namespace)
            except ValueError:
                if time.monotonic() > deadline:
                    raise RolloutError(
                        f"the controller waited {timeouts.engine_start_s:.0f} s for replica {index}"
                    ) from None
                await asyncio.sleep(0.05)
        return cls(spec, replicas, timeouts)

    @property
    def members(self) -> list[int]:
        """The indices of all replicas, sorted."""
        return sorted(self._members)

    def admit_joining(self) -> None:
        """Let the restarted replicas serve. Call it when they hold the current weights."""
        for index in sorted(self._joining):
            self.pool.admit(index)
        self._joining.clear()

    async def restart(self, indices: Sequence[int]) -> None:
        """Replace replicas by new ones under the same names; they serve after `admit_joining`.

        Raises RolloutError if one does not start. The controller owns them: actors of a rank would end with the rank.
        """

        async def restart_one(index: int) -> None:
            old = self.pool.handle(index)
            new = await restart_replica(self._spec, index, old, self._timeouts.engine_start_s)
            self.pool.replace(index, new)
            self._joining.add(index)

        await asyncio.gather(*(restart_one(index) for index in indices))

    async def reset(self) -> None:
        """Drop all requests of every engine, and replace engines that fail to do so or are in the middle of a sync."""
        broken = []

        async def reset_one(index: int) -> None:
            try:
                await self.pool.call(index, "reset", timeout_s=self._timeouts.rpc_s)
            except RolloutError as error:
                logger.warning("replacing replica %d: %s", index, error)
                broken.append(index)

        await asyncio.gather(*(reset_one(index) for index in self.members))
        await self.restart(sorted(broken))

    async def devices(self) -> list[HeldDevices]:
        """Return the devices that each serving replica holds."""
        return [await self.pool.call(index, "devices", timeout_s=self._timeouts.rpc_s) for index in self.pool.alive]

    def _where_its_log_is(self, index: int) -> str:
        return f"see {Path(self._spec.run_dir) / 'logs' / f'replica-{index}.log'}"
