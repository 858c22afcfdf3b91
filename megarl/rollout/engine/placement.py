"""Ray's room for more engines."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import platform
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.common.errors import RolloutError
from megarl.common.rundir.private_directory import VARIABLE

POLL_S = 0.1

# The devices that ranks and replicas actually hold, as both sides report them. The two sets must be disjoint.


@dataclass(frozen=True)
class HeldDevices:
    """The devices of one owner on one host.

    `devices`: GPU UUIDs, which CUDA_VISIBLE_DEVICES does not renumber; empty without GPUs.
    """

    owner: str
    host: str
    devices: tuple[str, ...]


def held_devices(owner: str, cuda: bool) -> HeldDevices:
    """Return all devices that this process sees. Without `cuda` nothing is initialised."""
    if not cuda:
        return HeldDevices(owner, platform.node(), ())
    import torch

    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return HeldDevices(owner, platform.node(), tuple(uuids))


def own_device(rank: int) -> HeldDevices:
    """Return the device of a trainer rank: the one GPU that it has set as current, not all that it sees."""
    import torch

    if not torch.cuda.is_available():
        return HeldDevices(f"trainer rank {rank}", platform.node(), ())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return HeldDevices(f"trainer rank {rank}", platform.node(), (str(properties.uuid),))


def refuse_overlap(trainer: Iterable[HeldDevices], pool: Iterable[HeldDevices]) -> None:
    """Raise RolloutError naming every device that a trainer rank and a replica both hold."""
    taken = {(held.host, device): held.owner for held in trainer for device in held.devices}
    clashes = [
        f"{device} on {held.host} (by {taken[held.host, device]} and {held.owner})"
        for held in pool
        for device in held.devices
        if (held.host, device) in taken
    ]
    if clashes:
        raise RolloutError(
            "trainer and rollout pool hold the same GPUs: "
            + ", ".join(sorted(clashes))
            + "; set disjoint trainer.devices and rollout.devices"
        )


def refuse_other_devices(trainer: Iterable[HeldDevices], pool: Iterable[HeldDevices]) -> None:
    """Raise RolloutError naming every device of a replica that no trainer rank holds, where they are to share them."""
    known = {(held.host, device) for held in trainer for device in held.devices}
    others = [
        f"{device} on {held.host} (by {held.owner})"
        for held in pool
        for device in held.devices
        if (held.host, device) not in known
    ]
    if others:
        raise RolloutError(
            f"with rollout.share_gpus engines are on the trainer's GPUs, but these are not: {', '.join(sorted(others))}"
        )


def refuse_split_replica(tensor_parallel: int, gpus_per_node: int) -> None:
    """Raise ValueError if an engine needs more GPUs than a node has: TP uses NVLink and never spans nodes."""
    if tensor_parallel > gpus_per_node:
        raise ValueError(
            f"rollout.tensor_parallel={tensor_parallel} does not fit into a node with {gpus_per_node} rollout GPUs; "
            "an engine never spans nodes: lower rollout.tensor_parallel or raise rollout.gpus_per_node"
        )


def visible_devices(indices: Iterable[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for `indices`, which count within this process's own CUDA_VISIBLE_DEVICES.

    Raises ValueError if there is no such device.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else None
    try:
        return ",".join(str(i) if names is None else names[i] for i in indices)
    except IndexError:
        raise ValueError(
            f"rollout.devices {list(indices)} do not exist: CUDA_VISIBLE_DEVICES={given} has {len(names or [])} GPUs"
        ) from None


# Custom Ray resources of rollout nodes: the first marks such a node, the second counts the engines that it can hold.
ROLLOUT_RESOURCE = "megarl_rollout"
ENGINE_RESOURCE = "megarl_engine"
# Ray's own resource of its head's node. What the run cannot lose is placed there, so that any other rollout node may
# fail.
HEAD_RESOURCE = "node:__internal_head__"
HEAD_SHARE = 0.001


def engine_needs(gpus: float, *, cuda: bool) -> dict[str, float]:
    """Return the Ray resources that one engine takes, all on one node. `gpus`: whole ones, or a share of one."""
    needs = {"CPU": 1.0, ENGINE_RESOURCE: 1.0}
    return needs | {"GPU": float(gpus)} if cuda else needs


@asynccontextmanager
async def starting_alone(name: str, timeout_s: float, *, cuda: bool) -> AsyncIterator[None]:
    """Wait until no other engine of the run is being started on this process's GPU, and keep others from it meanwhile.

    vLLM measures the GPU's memory while an engine starts. Does nothing without `cuda`. `name`: of the engine. Raises
    TimeoutError naming the engine that has not started within `timeout_s`.
    """
    directory, device = os.environ.get(VARIABLE), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not cuda or not directory or not device:
        yield
        return
    deadline = time.monotonic() + timeout_s
    with (Path(directory) / f"start-{device}").open("a+") as lock:
        while not _taken(lock.fileno()):
            if time.monotonic() > deadline:
                lock.seek(0)
                raise TimeoutError(
                    f"{name} waited {timeout_s:.0f} s (timeouts.engine_start_s) for {lock.read()} to start on GPU "
                    f"{device}, which they share"
                )
            await asyncio.sleep(POLL_S)
        try:
            lock.truncate(0)
            lock.write(name)
            lock.flush()
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process has the file too


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def places_on(nodes: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Return how many engines nodes with these free resources can hold. An engine never spans nodes."""
    return sum(min(math.floor(node.get(name, 0.0) / amount) for name, amount in needs.items()) for node in nodes)


def free_places(needs: Mapping[str, float]) -> int:
    """Return how many more engines the living nodes of this process's Ray cluster can hold."""
    from ray._private import state

    return places_on(state.available_resources_per_node().values(), needs)
