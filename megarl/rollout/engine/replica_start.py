"""Starts replica actors: creates one, waits until it is placed and up, replaces a lost one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.common.errors import NoPlace, ReplicaFailed
from megarl.config.derived.teachers import policy_gpus
from megarl.config.schema import Config, TimeoutsConfig
from megarl.rollout.engine.placement import engine_needs
from megarl.rollout.engine.replica import EngineReplica, ReplicaSpec

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# Concurrent calls: each gateway response has one open nearly all the time, and must not block a weight sync.
MOST_CALLS = 40_000


def replica_name(index: int) -> str:
    """Return the Ray name of a replica inside the run's namespace."""
    return f"replica-{index}"


def create_replica(spec: ReplicaSpec, index: int) -> ActorHandle:
    """Create, but do not start, the EngineReplica actor of a new replica. The calling process owns it.

    The actor gets `num_gpus` (TP, or a share of a GPU) and no placement group: inside one, vLLM would silently choose
    its Ray executor, which asks for GPUs outside the actor.
    """
    import ray

    config = Config.model_validate_json(spec.config_json)
    needs = engine_needs(policy_gpus(config.rollout, config.teachers), cuda=spec.cuda)
    options = {"num_gpus": needs.pop("GPU", 0), "num_cpus": needs.pop("CPU"), "max_concurrency": MOST_CALLS}
    return (
        ray.remote(EngineReplica)
        .options(name=replica_name(index), namespace=spec.namespace, resources=needs, **options)
        .remote(spec, index)
    )


class EndedReplica:
    """Stands in for the actor of an ended replica without a handle; every call fails."""

    def __init__(self, index: int) -> None:
        self._index = index

    async def remote(self, *args: object) -> None:
        """Raise ReplicaFailed, whatever the method."""
        raise ReplicaFailed(self._index, f"replica {self._index} has ended with the controller that had started it")

    def __getattr__(self, method: str) -> EndedReplica:
        """Return the stand-in for a method of the actor."""
        if method.startswith("_"):
            raise AttributeError(method)
        return self


async def restart_replica(
    spec: ReplicaSpec, index: int, old: ActorHandle | EndedReplica, timeouts: TimeoutsConfig
) -> ActorHandle:
    """Kill `old` and start a new replica under its name. Raises as `start_replica`.

    Also raises NoPlace if `old` has not died within `timeouts.node_s`, because its node cannot be reached.
    """
    import ray

    began = time.monotonic()
    if not isinstance(old, EndedReplica):
        ray.kill(old)
    while True:
        try:
            # The name is free only once Ray has noticed the death of the old actor.
            handle = create_replica(spec, index)
            break
        except ValueError:
            if time.monotonic() > began + timeouts.node_s:
                reason = f"replica {index} did not die within {timeouts.node_s:.0f} s (timeouts.node_s)"
                raise NoPlace(index, reason) from None
            await asyncio.sleep(0.1)
    return await start_replica(handle, index, timeouts, began)


async def start_replica(
    handle: ActorHandle, index: int, timeouts: TimeoutsConfig, began: float | None = None,
    placed: Callable[[], object] = lambda: None,
) -> ActorHandle:  # fmt: skip
    """Wait until a created replica is placed, call `placed`, and wait until its engine is up; kill it on failure.

    Raises NoPlace if Ray has not placed it within `timeouts.node_s`, ReplicaFailed if it is not up within
    `timeouts.engine_start_s`. Both count from the time `began` (`time.monotonic`), by default now.
    """
    import ray

    began = time.monotonic() if began is None else began
    try:
        await _placed(handle, index, timeouts.node_s)
        placed()
        try:
            async with asyncio.timeout(timeouts.engine_start_s - (time.monotonic() - began)):
                await handle.start.remote()
        except TimeoutError:
            waited = f"waited {timeouts.engine_start_s:.0f} s for replica {index} to start"
            raise ReplicaFailed(index, waited) from None
    except BaseException:
        ray.kill(handle)  # the next attempt needs its name and GPU memory
        raise
    return handle


async def _placed(handle: ActorHandle, index: int, timeout_s: float) -> None:
    """Wait until a replica's actor runs. Raises NoPlace after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await handle.__ray_ready__.remote()
    except TimeoutError:
        waited = f"waited {timeout_s:.0f} s (timeouts.node_s) for Ray to place replica {index}"
        raise NoPlace(index, f"{waited}: no node has room for its engine") from None
