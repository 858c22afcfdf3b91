"""The work of one rank of a test world in a sync: exporters with gathers, several senders, failures."""

import itertools
import os
import signal
import time
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from megarl.common.errors import WeightSyncError
from megarl.models.hf.export import HFExporter
from megarl.models.hf.gather import Gather, GatherRequest, GlooWaiter
from megarl.weights.group.store import SyncStore
from megarl.weights.plan.settings import SyncSettings
from megarl.weights.send.sender import WeightSender
from tests.support.engines.fake_engines import TRANSPORT, FakePool, ListExporter, ListGather, random_tensors
from tests.support.ranks.models.layouts import make_layout, use_layout
from tests.support.ranks.models.models import load

SETTINGS = SyncSettings(bucket_bytes=8192, sync_s=30.0, rpc_s=20.0, restart_s=20.0, restarts=1, transport=TRANSPORT)


def with_settings(**changes: Any) -> SyncSettings:
    return SyncSettings(**{**SETTINGS.__dict__, "run_dir": Path(os.environ["WORLD_RUN_DIR"]), **changes})


class GatheringExporter(ListExporter):
    """Every rank takes part in an (imitated) gather of every bucket, whoever owns it.

    The messages have a group of their own: after a failure some are left over.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=30))
        self.waiter = GlooWaiter()

    def gather(self, request: GatherRequest, owned: bool) -> ListGather:
        owner = self.manifest()[request.rows[0].tensor].owner
        return TokenGather(self, request, owner, owned)


class TokenGather(ListGather):
    """The owner has all rows, and receives four numbers from every other rank."""

    def __init__(self, exporter: GatheringExporter, request: GatherRequest, owner: int, owned: bool) -> None:
        super().__init__(exporter, request)
        self._exporter: GatheringExporter = exporter
        self.owned = owned
        others = [rank for rank in range(torch.distributed.get_world_size()) if rank != owner]
        self._peers = others if owned else [owner]
        self._sent: dict[int, Future[None]] = {}

    def copy(self) -> None:
        if self.owned:
            super().copy()
        else:
            self._exporter.before_copy(self._request.rows[0].tensor)

    def post(self) -> None:
        transfer = torch.distributed.irecv if self.owned else torch.distributed.isend
        group, waiter = self._exporter.group, self._exporter.waiter
        self._sent = {peer: waiter.wait(transfer(torch.zeros(4), peer, group=group)) for peer in self._peers}

    def done(self, timeout_s: float | None) -> bool:
        return not wait(self._sent.values(), timeout_s).not_done

    def unfinished_peers(self) -> tuple[int, ...]:
        return tuple(peer for peer, future in self._sent.items() if not future.done())


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
    sender = WeightSender(with_settings(), exporter)
    sender.connect(pool)
    reports = []
    for version in range(3):
        exporter.tensors = random_tensors(seed=version)
        reports.append(sender.publish(version))
        if pool is not None:
            assert_equal(pool, exporter.tensors)
            assert [replica.version for replica in pool.replicas()] == [str(version)] * 2
    sender.close()
    torch.distributed.destroy_process_group(exporter.group)
    return {"senders": sender.plan.owners, "reports": [r.__dict__ for r in reports]}


class CountedRequests:
    """Counts the requests of a connection to a store."""

    def __init__(self, store: Any) -> None:
        self.store, self.count = store, 0

    def __getattr__(self, name: str) -> Any:
        self.count += name != "set_timeout"
        return getattr(self.store, name)


def requests_of_a_publish(owners: str) -> dict[str, Any]:
    """The requests of this rank to the sync's store in the second version, on rank 0 with those of three workers."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    connections: list[SyncStore] = []

    def opened(self: SyncStore, *arguments: Any, **options: Any) -> None:
        of_library(self, *arguments, **options)
        connections.append(self)

    of_library = SyncStore.__init__
    pool = FakePool(1, 2) if rank == 0 else None
    exporter = GatheringExporter(random_tensors(), rank, lambda name: OWNERS[owners](name, world))
    with patch.object(SyncStore, "__init__", opened):
        sender = WeightSender(with_settings(), exporter)
        sender.connect(pool)
        sender.publish(0)
        counted = [CountedRequests(each._store) for each in connections]
        for connection, store in zip(connections, counted, strict=True):
            connection._store = store
        buckets = sender.publish(1).buckets
        requests = sum(each.count for each in counted)
    sender.close()
    torch.distributed.destroy_process_group(exporter.group)
    return {"requests": requests, "senders": sender.plan.owners, "buckets": buckets}


def publish_while_an_engine_fails(restarts: int) -> dict[str, Any]:
    """The engine fails in mid-sync; both ranks learn the same, and stay in step: the next collective works."""
    rank = torch.distributed.get_rank()
    pool = FakePool(1, 1) if rank == 0 else None
    exporter = GatheringExporter(random_tensors(), rank, lambda name: OWNERS["stages"](name, 2))
    sender = WeightSender(with_settings(restarts=restarts), exporter)
    sender.connect(pool)
    sender.publish(0)
    exporter.tensors = random_tensors(seed=1)
    if pool is not None:
        seen = pool.replicas()[1].loaders[0].loads
        pool.replicas()[1].loaders[0].before_load = lambda load: 1 / 0 if load == seen + 4 else None  # type: ignore[assignment, return-value]
    result: dict[str, Any] = {"error": None, "failed_members": (), "restarted": ()}
    try:
        result["restarted"] = sender.publish(1).restarted
    except WeightSyncError as error:
        result |= {"error": str(error), "failed_members": tuple(error.failed_members)}
    torch.distributed.barrier()
    if pool is not None and result["restarted"]:
        assert pool.names() == ["replica 0"] and pool.replaced_later == ["replica 1"] and not pool.restarted
        assert_equal(pool, exporter.tensors)
        pool.add("replica 2")
    if result["restarted"]:
        exporter.tensors = random_tensors(seed=2)
        sender.publish(2)
    if pool is not None and result["restarted"]:
        assert [replica.version for replica in pool.replicas()] == ["2", "2"]
        assert_equal(pool, exporter.tensors)
    torch.distributed.destroy_process_group(exporter.group)
    return result


def publish_while_a_rank_hangs(how: str, owners: str, first: int, published: int) -> dict[str, Any]:
    """Rank 1 hangs in a gather: its thread sleeps ("sleep"), or its process is stopped ("stop").

    `first`: the tensor in whose gather it hangs, or the first one after it; `published`: the syncs before that one. All
    other ranks raise; then rank 1 goes on, and all groups are in step again.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pids: list[int] = [0] * world
    torch.distributed.all_gather_object(pids, os.getpid())
    store = torch.distributed.distributed_c10d._get_default_store()
    release = f"hang/{how}/{owners}/{first}/{published}"
    pool = FakePool(1, 1) if rank == 0 else None
    exporter = GatheringExporter(random_tensors(), rank, lambda name: OWNERS[owners](name, world))
    settings = with_settings(sync_s=3.0)
    sender = WeightSender(settings, exporter)
    sender.connect(pool)
    for version in range(published):
        sender.publish(version)
    hung: list[int] = []

    def before_copy(tensor: int) -> None:
        if tensor < first or hung:
            return
        hung.append(tensor)
        if how == "stop" and rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
        if how == "sleep" and rank == 1:
            store.wait([release], timedelta(seconds=40))

    exporter.before_copy = before_copy
    torch.distributed.barrier()
    result: dict[str, Any] = {"error": None, "failed_members": ()}
    try:
        sender.publish(published)
    except WeightSyncError as error:
        result = {"error": str(error), "failed_members": tuple(error.failed_members)}
        result["needs_restart"] = tuple(error.needs_restart)
    if pool is not None:
        result["pauses"] = [replica.calls.count("pause") for replica in pool.replicas()]
        result["serving"] = [replica.serving and replica.failed is None for replica in pool.replicas()]
    store.add(f"{release}/raised", 1)
    if rank == 0:
        while store.add(f"{release}/raised", 0) < world - 1:
            time.sleep(0.05)
        os.kill(pids[1], signal.SIGCONT)
        store.set(release, "now")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group(exporter.group)
    return result


def export_while_a_rank_hangs(model: str, published: int) -> dict[str, Any]:
    """With TP=2 and the real exporter, rank 1 hangs where it copies its part of a gather, until rank 0 has raised."""
    rank = torch.distributed.get_rank()
    store = torch.distributed.distributed_c10d._get_default_store()
    release = f"hang/export/{published}"
    layout = make_layout(tensor=2)
    with use_layout(layout):
        info, _, chunks = load(model, layout)
        pool = FakePool(1) if rank == 0 else None
        settings = with_settings(bucket_bytes=20_000, sync_s=3.0, restarts=0)
        sender = WeightSender(settings, HFExporter(chunks, info, torch.float32))
        sender.connect(pool)
        for version in range(published):
            sender.publish(version)
        copy, calls = Gather.copy, itertools.count()

        def copy_late(gather: Gather) -> None:
            if rank == 1 and next(calls) == 2:
                store.wait([release], timedelta(seconds=40))
            copy(gather)

        torch.distributed.barrier()
        result: dict[str, Any] = {"error": None, "failed_members": ()}
        with patch.object(Gather, "copy", copy_late):
            try:
                sender.publish(published)
            except WeightSyncError as error:
                result = {"error": str(error), "failed_members": tuple(error.failed_members)}
                store.set(release, "now")
        torch.distributed.barrier()
    return result


def export_through_megatron(model: str, sizes: dict[str, int], bucket_bytes: int) -> list[int]:
    """The real exporter of a Megatron model under a layout; what arrives is what is in the files."""

    rank = torch.distributed.get_rank()
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, _, chunks = load(model, layout)
        pool = FakePool(2) if rank == 0 else None
        sender = WeightSender(
            with_settings(bucket_bytes=bucket_bytes),
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
