"""Who holds which device. The trainer's and the pool's sets must be disjoint; both report what they really hold."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.common.errors import RolloutError


@dataclass(frozen=True)
class HeldDevices:
    """`devices`: GPU UUIDs, which no renumbering by CUDA_VISIBLE_DEVICES changes; empty without GPUs."""

    owner: str
    host: str
    devices: tuple[str, ...]


def held_devices(owner: str, cuda: bool) -> HeldDevices:
    """What this process can see. Without `cuda` it initialises nothing."""
    if not cuda:
        return HeldDevices(owner, platform.node(), ())
    import torch

    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return HeldDevices(owner, platform.node(), tuple(uuids))


def own_device(rank: int) -> HeldDevices:
    """What a trainer rank holds: the one GPU it has set as current, not all it could see."""
    import torch

    if not torch.cuda.is_available():
        return HeldDevices(f"trainer rank {rank}", platform.node(), ())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return HeldDevices(f"trainer rank {rank}", platform.node(), (str(properties.uuid),))


def refuse_overlap(trainer: Iterable[HeldDevices], pool: Iterable[HeldDevices]) -> None:
    """RolloutError naming every device that a trainer rank and a replica both hold."""
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


def refuse_split_replica(tensor_parallel: int, gpus_per_node: int) -> None:
    """ValueError if one engine would need more GPUs than a node has: TP runs over NVLink, never between nodes."""
    if tensor_parallel > gpus_per_node:
        raise ValueError(
            f"rollout.tensor_parallel={tensor_parallel} does not fit into a node with {gpus_per_node} rollout GPUs; "
            "an engine never spans nodes: lower rollout.tensor_parallel or raise rollout.gpus_per_node"
        )


def visible_devices(indices: Iterable[int]) -> str:
    """CUDA_VISIBLE_DEVICES for `indices`, which count within what this process was given."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else None
    try:
        return ",".join(str(i) if names is None else names[i] for i in indices)
    except IndexError:
        raise ValueError(
            f"rollout.devices {list(indices)} do not exist: CUDA_VISIBLE_DEVICES={given} has {len(names or [])} GPUs"
        ) from None
