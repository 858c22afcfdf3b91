"""The replicas of a run: which there are, which serve, and how lost ones are replaced.

The config says how many replicas a run starts with. From then on this is the only place that knows how many there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.common.errors import RolloutError
from megarl.config.schema import TimeoutsConfig
from megarl.rollout.devices import HeldDevices
from megarl.rollout.pool import RolloutPool
from megarl.rollout.replica import ReplicaSpec, replica_name, restart_replica

logger = logging.getLogger(__name__)


class Fleet:
    """`pool` generates on the replicas that serve; `members` are all of them, lost and joining ones included."""

    def __init__(self, spec: ReplicaSpec, replicas: dict[int, Any], timeouts: TimeoutsConfig) -> None:
        """`replicas`: index -> actor handle, all of them started."""
        self._spec, self._timeouts = spec, timeouts
        self._joining: set[int] = set()
        self._members = set(replicas)
        self.pool = RolloutPool(replicas, timeout_s=timeouts.generate_s, describe=self._where_its_log_is)

    @classmethod
    async def attach(cls, spec: ReplicaSpec, count: int, timeouts: TimeoutsConfig) -> Fleet:
        """Wait for the `count` replicas with which the run starts. RolloutError if one is not there in time."""
        import ray

        replicas: dict[int, Any] = {}
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
        """Indices of all replicas."""
        return sorted(self._members)

    def admit_joining(self) -> None:
        """Replicas that were restarted hold the current weights now: let them serve."""
        for index in sorted(self._joining):
            self.pool.admit(index)
        self._joining.clear()

    async def restart(self, indices: Sequence[int]) -> None:
        """Replace replicas by fresh ones under the same names; they serve after `admit_joining`.

        RolloutError if one does not come up. (The controller is their owner: a rank's actors would end with the rank.)
        """

        async def restart_one(index: int) -> None:
            old = self.pool.handle(index)
            fresh = await restart_replica(self._spec, index, old, self._timeouts.engine_start_s)
            self.pool.replace(index, fresh)
            self._joining.add(index)

        await asyncio.gather(*(restart_one(index) for index in indices))

    async def reset(self) -> None:
        """Make every engine idle and whole; those that cannot be are replaced."""
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
        """What every replica that serves holds."""
        return [await self.pool.call(index, "devices", timeout_s=self._timeouts.rpc_s) for index in self.pool.alive]

    def _where_its_log_is(self, index: int) -> str:
        return f"see {Path(self._spec.run_dir) / 'logs' / f'replica-{index}.log'}"
