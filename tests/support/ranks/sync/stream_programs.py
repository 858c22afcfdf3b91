"""Small programs on simulated streams, for the tests of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore

from tests.support.streams.simulated_nccl import SimulatedNCCL
from tests.support.streams.simulated_streams import Device, on

_count = 0


@contextmanager
def two_groups(single_queue: bool, host_wait_s: float) -> Iterator[tuple[Device, SimulatedNCCL, SimulatedNCCL]]:
    """A device, and two communicators over all ranks."""
    global _count
    _count += 1
    device = Device(single_queue=single_queue, host_wait_s=host_wait_s)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store = torch.distributed.distributed_c10d._get_default_store()
    names = [f"programs/{_count}/{name}" for name in "ab"]
    groups = [SimulatedNCCL(PrefixStore(name, store.clone()), rank, world, device) for name in names]
    try:
        yield device, groups[0], groups[1]
        torch.distributed.barrier()
    finally:
        device.close()


def broadcast(group: SimulatedNCCL, tensor: torch.Tensor) -> Any:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([tensor], options)


def run(program: str, *, single_queue: bool = False, host_wait_s: float = 20.0) -> Any:
    """Run a program of this module on all ranks; returns its result, or "stuck" if the host waits in vain."""
    with two_groups(single_queue, host_wait_s) as (device, first, second), on(device):
        try:
            return PROGRAMS[program](device, first, second)
        except TimeoutError:
            return "stuck"


def unordered_groups(device: Device, first: SimulatedNCCL, second: SimulatedNCCL) -> str:
    """Two ranks issue operations of two groups in different orders; no stream waits for either."""
    tensors = torch.zeros(2), torch.zeros(2)
    order = (first, second) if torch.distributed.get_rank() == 0 else (second, first)
    for group, tensor in zip(order, tensors, strict=True):
        broadcast(group, tensor)
    device.synchronize()
    return "done"


def unordered_waits(device: Device, first: SimulatedNCCL, second: SimulatedNCCL) -> str:
    """Do what `unordered_groups` does; the default stream waits for each operation."""
    order = (first, second) if torch.distributed.get_rank() == 0 else (second, first)
    for group in order:
        broadcast(group, torch.zeros(2)).wait()
    device.synchronize()
    return "done"


def ordered_waits(device: Device, first: SimulatedNCCL, second: SimulatedNCCL) -> str:
    for group in (first, second, first):
        broadcast(group, torch.zeros(2)).wait()
    device.synchronize()
    return "done"


PROGRAMS: dict[str, Callable[[Device, SimulatedNCCL, SimulatedNCCL], Any]] = {
    each.__name__: each for each in (unordered_groups, unordered_waits, ordered_waits)
}
