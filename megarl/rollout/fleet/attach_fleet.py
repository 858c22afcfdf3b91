"""Finds the actors of a run's replicas, which the supervisor creates, and makes the run's fleet of them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from megarl.common.errors import RolloutError
from megarl.config.schema import Config
from megarl.rollout.engine.replica import EndedReplica, ReplicaSpec, replica_name, restart_replica
from megarl.rollout.fleet.engine_pool import Fleet


async def attach_fleet(spec: ReplicaSpec, config: Config, *, wait: bool = True) -> Fleet:
    """Wait until the replicas of the run's start exist; without `wait`, one that does not exist has ended.

    Raises RolloutError naming the first that does not within `timeouts.engine_start_s`.
    """
    timeouts = config.timeouts
    replicas = await _find_replicas(spec, config, wait)
    logs = Path(spec.run_dir) / "logs"
    fleet = Fleet(
        replicas,
        timeouts,
        lambda index, old: restart_replica(spec, index, old, timeouts),
        lambda index: f"see {logs / f'replica-{index}.log'}",
        report_interval_s=config.rollout.report_interval_s,
        sync_restarts=config.weight_sync.restarts,
    )
    if not wait:
        fleet.membership.leave_out(int(path.stem.removeprefix("replica-")) for path in logs.glob("replica-*.log"))
    return fleet


async def _find_replicas(spec: ReplicaSpec, config: Config, wait: bool) -> dict[int, Any]:
    """Return the actors of the run's start, by index."""
    import ray

    start_s, count = config.timeouts.engine_start_s, config.rollout.replicas
    replicas: dict[int, Any] = {}
    deadline = time.monotonic() + start_s
    while len(replicas) < count:
        index = len(replicas)
        try:
            replicas[index] = ray.get_actor(replica_name(index), namespace=spec.namespace)
        except ValueError:
            if not wait:
                replicas[index] = EndedReplica(index)
                continue
            if time.monotonic() > deadline:
                raise RolloutError(f"the controller waited {start_s:.0f} s for replica {index}") from None
            await asyncio.sleep(0.05)
    return replicas
