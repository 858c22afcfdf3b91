"""Where engines run: the devices they hold, and Ray's room for more of them."""

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


@dataclass(frozen=True)
class HeldDevices:
    """The GPU UUIDs that a rank or replica holds on its host; CUDA_VISIBLE_DEVICES does not renumber these."""

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
    """Return the device of a trainer rank: its current GPU, not all GPUs that it sees."""
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
    """Raise RolloutError naming every replica device that no trainer rank holds; for runs that share GPUs."""
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
    """Return CUDA_VISIBLE_DEVICES for `indices` into this process's devices. Raises ValueError for a missing one."""
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
# Ray's resource of the head node. Actors that the run cannot lose are placed there, so any other rollout node may fail.
HEAD_RESOURCE = "node:__internal_head__"
HEAD_SHARE = 0.001


def engine_needs(gpus: float, *, cuda: bool) -> dict[str, float]:
    """Return the Ray resources of one engine, all on one node. `gpus`: a whole number, or a share of one GPU."""
    needs = {"CPU": 1.0, ENGINE_RESOURCE: 1.0}
    return needs | {"GPU": float(gpus)} if cuda else needs


@asynccontextmanager
async def starting_alone(name: str, timeout_s: float, *, cuda: bool) -> AsyncIterator[None]:
    """Hold this process's GPU while the engine `name` starts, so no other engine of the run starts on it.

    vLLM measures the GPU's memory during its start. Does nothing without `cuda`. Raises TimeoutError naming the engine
    that still starts after `timeout_s`.
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
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked process has the file open too


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def places_on(nodes: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Return how many engines fit on nodes with these free resources. An engine never spans nodes."""
    return sum(min(math.floor(node.get(name, 0.0) / amount) for name, amount in needs.items()) for node in nodes)


def free_places(needs: Mapping[str, float]) -> int:
    """Return how many more engines the live nodes of this process's Ray cluster can hold."""
    from ray._private import state

    return places_on(state.available_resources_per_node().values(), needs)
