"""A pool of engines without vLLM: the real receiver in threads, loading into dictionaries."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from megarl.common.errors import ConnectionLost, PeerTimeout, SyncAborted
from megarl.models.hf.gather import GatherRequest
from megarl.rollout.engine.engine_requests import WeightState
from megarl.weights.group.protocols import ABANDON
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers
from megarl.weights.plan.buckets import unpack_manifest
from megarl.weights.receive.receiver import Receiver

# Of the tests of weight sync: gloo, or that of `make nightly-shared-faults`, relay.
TRANSPORT = os.environ.get("MEGARL_TEST_TRANSPORT", "gloo")


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int


class ListExporter:
    """`HFExporter`'s interface over tensors that every rank has; `owner(name)` decides who sends what."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], rank: int = 0, owner: Callable[[str], int] = lambda _: 0
    ) -> None:
        self.tensors, self._rank, self._owner = tensors, rank, owner
        self.before_copy: Callable[[int], None] = lambda _: None

    def manifest(self) -> list[Entry]:
        return [Entry(n, tuple(t.shape), t.dtype, self._owner(n)) for n, t in self.tensors.items()]

    def connect(self, timeout_s: float) -> None:
        """There is nobody to connect with."""

    def gathers(self, requests: Sequence[GatherRequest], device: torch.device) -> list[ListGather | None]:
        owners = [entry.owner for entry in self.manifest()]
        return [self.gather(r, owned=owners[r.rows[0].tensor] == self._rank) for r in requests]

    def gather(self, request: GatherRequest, owned: bool) -> ListGather | None:
        return ListGather(self, request) if owned else None


class ListGather:
    """A gather without peers: the owner has all rows. `before_copy` is called with the number of each tensor."""

    owned = True

    def __init__(self, exporter: ListExporter, request: GatherRequest) -> None:
        self._exporter, self._request = exporter, request

    def copy(self) -> None:
        tensors = list(self._exporter.tensors.values())
        for rows, target in zip(self._request.rows, self._request.targets, strict=True):
            self._exporter.before_copy(rows.tensor)
            tensor = tensors[rows.tensor]
            target.copy_(tensor[rows.start : rows.stop] if tensor.dim() else tensor)

    def post(self) -> None:
        """There is nobody to receive from."""

    def done(self, timeout_s: float | None) -> bool:
        return True

    def finish(self) -> None:
        """Everything was copied."""

    def unfinished_peers(self) -> tuple[int, ...]:
        return ()


class DictLoader:
    """Copies what it is given; can fail or hang at the n-th load."""

    report = "copies"

    def __init__(self, obstacle: str | None = None) -> None:
        self.obstacle = obstacle
        self.tensors: dict[str, torch.Tensor] = {}
        self.loads = 0
        self.before_load: Callable[[int], None] = lambda _: None

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.before_load(self.loads)
        self.loads += 1
        for name, tensor in tensors:
            self.tensors[name] = tensor.clone()

    def detach(self, buffer: torch.Tensor) -> None:
        """Nothing is held."""


class FakeReplica:
    """A replica with `workers` receivers. It records every call, and the version it would serve."""

    def __init__(self, name: str, workers: int = 1, obstacle: str | None = None) -> None:
        """`obstacle`: why its last worker cannot load in place."""
        self.name = name
        self.loaders = [DictLoader() for _ in range(workers - 1)] + [DictLoader(obstacle)]
        self.calls: list[str] = []
        self.version: str | None = None
        self.serving = True
        self.cleared: bool | None = None  # whether the last pause cleared the KV cache
        self.failed: str | None = None
        self.weights = WeightState(has_weights=False)
        self.on: dict[str, Callable[[], None]] = {}
        self._receivers: list[Receiver] = []
        self._pool = ThreadPoolExecutor(max_workers=workers)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append(method)
        if method in self.on:
            self.on[method]()
        if self.failed is not None:
            raise RuntimeError(f"{self.name} refuses: {self.failed}")
        return getattr(self, f"_{method}")(*args)

    def _world_size(self) -> int:
        return len(self.loaders)

    def _init_weight_transfer(self, info: dict[str, Any]) -> None:
        plan = unpack_manifest(info["manifest"], info["plan_hash"])
        members = GroupMembers.from_json(info["members"])

        def join(worker: int) -> Receiver:
            store = SyncStore(info["host"], info["port"], bytes.fromhex(info["key"]))
            group = Group(store, members, members.offset(info["replica"]) + worker)
            group.join(info["timeout_s"], loads_in_place=self.loaders[worker].obstacle is None)
            return Receiver(group, plan, self.loaders[worker], torch.device("cpu"))

        self._receivers = list(self._pool.map(join, range(len(self.loaders))))

    def _pause(self, clear_cache: bool) -> None:
        self.serving, self.cleared = False, clear_cache

    def _start_weight_update(self) -> None:
        self.weights.begin()

    def _update_weights(self, info: dict[str, Any]) -> None:
        """Receive; return early if another member fails, as a real engine does."""
        self.weights.receive()
        plan = {name: info[name] for name in ("layer_span", "plan_hash", "left_out") if name in info}
        futures = [
            self._pool.submit(r.receive, info["sync"], info["version"], info["timeout_s"], **plan)
            for r in self._receivers
        ]
        for future in futures:
            with contextlib.suppress(SyncAborted, ConnectionLost, PeerTimeout):
                future.result()

    def _finish_weight_update(self, version: str) -> None:
        self.weights.finished()
        self.version = version

    def _abandon_weight_update(self, info: dict[str, Any]) -> None:
        assert info == ABANDON
        if self.weights.in_session:
            self.weights.abandoned()

    def _resume(self) -> None:
        if self.weights.obstacle is not None:
            raise RuntimeError(f"{self.name} {self.weights.obstacle}")
        self.serving = True

    def _fail(self, reason: str) -> None:
        self.failed = reason


class FakePool:
    def __init__(self, *workers: int) -> None:
        self._replicas = [FakeReplica(f"replica {i}", n) for i, n in enumerate(workers)]
        self.restarted: list[str] = []
        self.replaced_later: list[str] = []
        self.can_restart = True
        self.lock = threading.Lock()

    def replicas(self) -> list[FakeReplica]:
        return self._replicas

    def names(self) -> list[str]:
        return [replica.name for replica in self.replicas()]

    def add(self, name: str, workers: int = 1) -> FakeReplica:
        """A further replica, which takes part from the next sync on."""
        self._replicas.append(FakeReplica(name, workers))
        return self._replicas[-1]

    def remove(self, name: str) -> FakeReplica:
        """The replica, which takes part no more."""
        return self._replicas.pop(self.names().index(name))

    def restart(self, names: Sequence[str], timeout_s: float) -> None:
        if not self.can_restart:
            raise RuntimeError("no GPU is free")
        for index, replica in enumerate(self._replicas):
            if replica.name in names:
                self.restarted.append(replica.name)
                self._replicas[index] = FakeReplica(replica.name, len(replica.loaders))

    def replace_later(self, names: Sequence[str], timeout_s: float) -> None:
        """A test adds the new ones."""
        if not set(self.names()) - set(names):
            self.restart(names, timeout_s)
            return
        self.replaced_later += names
        self._replicas = [replica for replica in self._replicas if replica.name not in names]


def random_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Some layers, a large embedding, odd sizes, an empty tensor."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {"embed": make(301, 32)}
    for layer in range(6):
        tensors |= {
            f"layers.{layer}.q": make(32, 32),
            f"layers.{layer}.bias": make(33),
            f"layers.{layer}.down": make(17, 48),
            f"layers.{layer}.scalar": make(),
        }
    return tensors | {"empty": make(0, 4), "head": make(301, 32).t()}
