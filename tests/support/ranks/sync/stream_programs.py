"""Small programs on simulated streams, for the tests of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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


def copies_in_flight(device: Device, group: SimulatedNCCL, _: SimulatedNCCL) -> dict[str, Any]:
    """Rank 0 fills, broadcasts, waits and overwrites. Rank 1 begins when the host of rank 0 has issued all of that."""
    rank = torch.distributed.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([f"programs/{_count}/issued"], timedelta(seconds=20))
    tensor = torch.zeros(4)
    tensor.add_(7.0 if rank == 0 else 1.0)
    work = broadcast(group, tensor)
    ended_at_once = work.is_completed()
    work.wait()
    doubled = tensor * 2
    tensor.fill_(-1.0)
    if rank == 0:
        store.set(f"programs/{_count}/issued", "")
    return {"value": float(doubled.sum().item()), "ended_at_once": ended_at_once}


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


def send_and_receive(device: Device, group: SimulatedNCCL, _: SimulatedNCCL) -> float:
    """A send waits for what is written before it, and what is written afterwards comes too late."""
    tensor = torch.zeros(3)
    if torch.distributed.get_rank() == 0:
        tensor.fill_(5.0)
        group.send([tensor], 1).wait()
        tensor.fill_(6.0)
    else:
        group.recv([tensor], 0).wait()
    return float(tensor.max().item())


PROGRAMS: dict[str, Callable[[Device, SimulatedNCCL, SimulatedNCCL], Any]] = {
    each.__name__: each
    for each in (copies_in_flight, unordered_groups, unordered_waits, ordered_waits, send_and_receive)
}
