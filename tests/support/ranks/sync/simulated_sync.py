"""The weight sync of a real Megatron exporter on simulated streams."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from megarl.common.errors import WeightSyncError
from megarl.models.hf import export
from megarl.models.hf.export import HFExporter
from megarl.weights.group.backends import BACKENDS, BackendKind
from megarl.weights.group.relay import MemberPlace
from megarl.weights.plan.digest import digest
from megarl.weights.plan.settings import SyncSettings
from megarl.weights.send.sender import WeightSender
from tests.support.engines.fake_engines import FakePool
from tests.support.ranks.models.layouts import make_layout, use_layout
from tests.support.ranks.models.models import load
from tests.support.streams.simulated_nccl import SimulatedNCCL
from tests.support.streams.simulated_streams import Device, on

BUCKET_BYTES = 20_000


def publish(
    model: str,
    sizes: dict[str, int],
    *,
    single_queue: bool,
) -> dict[str, Any]:
    """Publish two versions to two workers. Rank 0 checks that what arrives is what is in the files."""
    rank = torch.distributed.get_rank()
    layout = make_layout(**sizes)
    result: dict[str, Any] = {"error": None}
    with use_layout(layout), simulated(single_queue, 64.0) as device:
        info, _, chunks = load(model, layout)
        exporter = HFExporter(chunks, info, torch.float32)
        pool = FakePool(2) if rank == 0 else None
        settings = SyncSettings(
            bucket_bytes=BUCKET_BYTES,
            sync_s=60.0,
            rpc_s=30.0,
            restarts=0,
            transport="simulated",
            run_dir=Path(os.environ["WORLD_RUN_DIR"]),
        )
        sender = WeightSender(settings, exporter)
        sender.connect(pool)
        result["connected"] = sum(len(group.connected) for group in device_groups(device))
        result["senders"] = sender.plan.owners
        result["buckets"] = [sum(b.owner == owner for b in sender.plan.buckets) for owner in sender.plan.owners]
        try:
            for version in range(2):
                with on(device):
                    sender.publish(version)
                if pool is not None:
                    assert_files_arrived(pool, model)
        except (WeightSyncError, TimeoutError) as error:
            result["error"] = str(error)
        if result["error"] is None:
            device.synchronize()
        sender.close()
    return result


def assert_files_arrived(pool: FakePool, model: str) -> None:
    files = load_file(Path(model) / "model.safetensors")
    for loader in pool.replicas()[0].loaders:
        assert loader.tensors.keys() == files.keys()
        for name, tensor in files.items():
            assert loader.tensors[name].numpy().tobytes() == tensor.numpy().tobytes(), name
        loader.tensors.clear()


@contextmanager
def simulated(single_queue: bool, host_wait_s: float) -> Iterator[Device]:
    """A device for this rank, on which its tensor-parallel groups and the sync's group run; engines have others."""
    digest(
        torch.zeros(8, dtype=torch.uint8), version=0, bucket=0
    )  # its constants, kept per process, belong to no device
    device, engines = Device(single_queue=single_queue, host_wait_s=host_wait_s), []

    def make(store: torch.distributed.Store, place: MemberPlace) -> SimulatedNCCL:
        if place.name.startswith("trainer"):
            return SimulatedNCCL(store, place.rank, place.size, device, delay_s=0.03)
        engines.append(Device(single_queue=single_queue))
        return SimulatedNCCL(store, place.rank, place.size, engines[-1])

    original = export._group
    groups = tensor_groups(device)

    def group_of(shard: Any) -> torch.distributed.ProcessGroup:
        return groups[tuple(torch.distributed.get_process_group_ranks(original(shard)))]

    kind = BackendKind("cpu", on_streams=True, make=make)
    try:
        with patch.dict(BACKENDS, simulated=kind), patch.object(export, "_group", group_of):
            yield device
            torch.distributed.barrier()  # while all devices still work
    finally:
        for each in (device, *engines):
            each.close()
        for group in groups.values():
            forget(group)


def tensor_groups(device: Device) -> dict[tuple[int, ...], torch.distributed.ProcessGroup]:
    """This rank's tensor-parallel group and expert-tensor-parallel group, simulated, by their ranks."""
    from megatron.core import parallel_state

    def create(store: torch.distributed.Store, rank: int, size: int, timeout: Any) -> SimulatedNCCL:
        _created.append(SimulatedNCCL(store, rank, size, device))
        return _created[-1]

    if "simulated" not in torch.distributed.Backend._plugins:
        torch.distributed.Backend.register_backend("simulated", _create, devices=["cpu"])
    _creators.append(create)
    mine = [
        tuple(torch.distributed.get_process_group_ranks(group))
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
    ]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    groups = {}
    for ranks in sorted({each for both in everyone for each in both if len(each) > 1}):
        group = torch.distributed.new_group(list(ranks), backend="simulated")
        if torch.distributed.get_rank() in ranks:
            groups[ranks] = group
    return groups


def device_groups(device: Device) -> list[SimulatedNCCL]:
    """This rank's tensor-parallel groups on a device."""
    return [group for group in _created if group._device is device]


_created: list[SimulatedNCCL] = []
_creators: list[Callable[..., SimulatedNCCL]] = []


def _create(*args: Any) -> SimulatedNCCL:
    """The newest creator's group: torch registers a backend once per process."""
    return _creators[-1](*args)


def forget(group: torch.distributed.ProcessGroup) -> None:
    """Remove a group from torch's tables, as `destroy_process_group` would."""
    world = torch.distributed.distributed_c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(group, None)
