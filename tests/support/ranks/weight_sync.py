"""What one rank of a test world does in a sync: exporters with gathers, several senders, failures."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megarl.common.errors import WeightSyncError
from megarl.models.export import HFExporter
from megarl.models.gather import GatherRequest
from megarl.weights.sender import SyncSettings, WeightSender
from tests.support.fake_engines import FakePool, ListExporter, ListGather, random_tensors
from tests.support.ranks.layouts import make_layout, use_layout
from tests.support.ranks.models import load

SETTINGS = SyncSettings(bucket_bytes=8192, sync_s=30.0, rpc_s=20.0, restart_s=20.0, restarts=1, transport="gloo")


class GatheringExporter(ListExporter):
    """Every rank takes part in an (imitated) gather of every bucket, whoever owns it."""

    def gather(self, request: GatherRequest, owned: bool) -> ListGather:
        owner = self.manifest()[request.rows[0].tensor].owner
        return TokenGather(self, request, owner, owned)


class TokenGather(ListGather):
    """The owner has all rows, and receives four numbers from every other rank."""

    def __init__(self, exporter: ListExporter, request: GatherRequest, owner: int, owned: bool) -> None:
        super().__init__(exporter, request)
        self.owned = owned
        others = [rank for rank in range(torch.distributed.get_world_size()) if rank != owner]
        self._peers = others if owned else [owner]
        self._threads: dict[int, threading.Thread] = {}

    def copy(self) -> None:
        if self.owned:
            super().copy()

    def post(self) -> None:
        transfer = torch.distributed.recv if self.owned else torch.distributed.send
        self._threads = {
            peer: threading.Thread(target=transfer, args=(torch.zeros(4), peer), daemon=True) for peer in self._peers
        }
        for thread in self._threads.values():
            thread.start()

    def done(self, timeout_s: float | None) -> bool:
        for thread in self._threads.values():
            thread.join(timeout_s)
        return not self.unfinished_peers()

    def unfinished_peers(self) -> tuple[int, ...]:
        return tuple(peer for peer, thread in self._threads.items() if thread.is_alive())


OWNERS = {
    "one": lambda name, world: 0,
    "stages": lambda name, world: min(world - 1, int(name.split(".")[1]) * world // 6) if "layers" in name else 0,
    "interleaved": lambda name, world: len(name) % world,
    "late": lambda name, world: world - 1 if name == "head" else 0,
}


def publish_with(owners: str) -> dict[str, Any]:
    """Three versions through two replicas; rank 0 checks what arrived."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pool = FakePool(1, 2) if rank == 0 else None
    exporter = GatheringExporter(random_tensors(), rank, lambda name: OWNERS[owners](name, world))
    sender = WeightSender(SETTINGS, exporter)
    sender.connect(pool)
    reports = []
    for version in range(3):
        exporter.tensors = random_tensors(seed=version)
        reports.append(sender.publish(version))
        if pool is not None:
            assert_equal(pool, exporter.tensors)
            assert [replica.version for replica in pool.replicas()] == [str(version)] * 2
    sender.close()
    return {"senders": sender.plan.owners, "reports": [r.__dict__ for r in reports]}


def publish_while_an_engine_fails(restarts: int) -> dict[str, Any]:
    """The engine fails in mid-sync; both ranks learn the same, and stay in step: the next collective works."""
    rank = torch.distributed.get_rank()
    pool = FakePool(1, 1) if rank == 0 else None
    exporter = GatheringExporter(random_tensors(), rank, lambda name: OWNERS["stages"](name, 2))
    sender = WeightSender(SyncSettings(**{**SETTINGS.__dict__, "restarts": restarts}), exporter)
    sender.connect(pool)
    sender.publish(0)
    if pool is not None:
        seen = pool.replicas()[1].loaders[0].loads
        pool.replicas()[1].loaders[0].before_load = lambda load: 1 / 0 if load == seen + 4 else None  # type: ignore[assignment, return-value]
    start = time.monotonic()
    result: dict[str, Any] = {"error": None, "failed_members": (), "restarted": ()}
    try:
        result["restarted"] = sender.publish(1).restarted
    except WeightSyncError as error:
        result |= {"error": str(error), "failed_members": tuple(error.failed_members)}
    result["seconds"] = time.monotonic() - start
    torch.distributed.barrier()
    if pool is not None and result["restarted"]:
        assert_equal(pool, exporter.tensors)
    return result


def export_through_megatron(model: str, sizes: dict[str, int], bucket_bytes: int) -> list[int]:
    """The real exporter of a Megatron model under a layout; what arrives is what is in the files."""

    rank = torch.distributed.get_rank()
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, _, chunks = load(model, layout)
        pool = FakePool(2) if rank == 0 else None
        sender = WeightSender(
            SyncSettings(**{**SETTINGS.__dict__, "bucket_bytes": bucket_bytes}),
            HFExporter(chunks, info, torch.float32),
        )
        sender.connect(pool)
        sender.publish(1)
        if pool is not None:
            files = load_file(Path(model) / "model.safetensors")
            for loader in pool.replicas()[0].loaders:
                assert loader.tensors.keys() == files.keys()
                assert all(torch.equal(loader.tensors[name], tensor) for name, tensor in files.items())
        sender.close()
    return sender.plan.owners


def assert_equal(pool: FakePool, tensors: dict[str, torch.Tensor]) -> None:
    for replica in pool.replicas():
        for loader in replica.loaders:
            assert loader.tensors.keys() == tensors.keys()
            assert all(torch.equal(loader.tensors[name], tensor) for name, tensor in tensors.items())
