"""The places that Ray has for further engines."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.common.errors import RolloutError

# The devices that ranks and replicas hold. The two sets must be disjoint; both sides report what they really hold.


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
# Ray's own resource of the node that runs its head. What the run cannot lose is placed there, so that it can lose any
# other rollout node.
HEAD_RESOURCE = "node:__internal_head__"
HEAD_SHARE = 0.001


def engine_needs(tensor_parallel: int, *, cuda: bool) -> dict[str, float]:
    """Return the Ray resources that one engine takes, all on one node."""
    needs = {"CPU": 1.0, ENGINE_RESOURCE: 1.0}
    return needs | {"GPU": float(tensor_parallel)} if cuda else needs


def places_on(nodes: Iterable[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Return how many engines nodes with these free resources can hold. An engine never spans nodes."""
    return sum(min(math.floor(node.get(name, 0.0) / amount) for name, amount in needs.items()) for node in nodes)


def free_places(needs: Mapping[str, float]) -> int:
    """Return how many engines the living nodes of this process's Ray cluster can hold besides what runs there."""
    from ray._private import state

    return places_on(state.available_resources_per_node().values(), needs)
