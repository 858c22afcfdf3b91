"""The trainer's part of a weight sync. `publish` is collective over all trainer ranks.

There are three roles, often in one process. Every rank iterates over the exporter's stream, so that its peers' gathers
complete. Ranks that own tensors pack them into buckets and broadcast them in the plan's order, from a separate thread,
so that a gather never waits for a broadcast. The leader, rank 0, calls the engines through `replica_calls.py` and sends
the outcome to all ranks. After a failure a rank continues to iterate over the stream without sending, so that its peers
complete their gathers and the sync can be repeated.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.distributed import Store

from megarl.common.errors import SyncAborted, WeightSyncError
from megarl.config.schema import Config, TimeoutsConfig, WeightSyncConfig
from megarl.weights.bucket_packer import SendBuffers, Sending
from megarl.weights.buckets import BucketPlan, ManifestEntry, make_plan
from megarl.weights.handles import EngineHandles
from megarl.weights.replica_calls import EngineCalls, SyncReport
from megarl.weights.transport import Group, GroupMembers, SyncStore, names_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
_serial = 0
_SYNC, _TIMEOUTS = WeightSyncConfig(), TimeoutsConfig()


class Exporter(Protocol):
    """The methods of `megarl.models.export.HFExporter` that a sync uses."""

    def manifest(self) -> Sequence[ManifestEntry]: ...
    def stream(self) -> Iterator[tuple[ManifestEntry, torch.Tensor | None]]: ...


@dataclass(frozen=True)
class SyncSettings:
    """The options of a sync; `_s` in seconds, `_bytes` in bytes. The defaults are those of the config."""

    bucket_bytes: int = int(_SYNC.bucket_mb * 2**20)
    transport: str = _SYNC.transport
    recompute_kv: bool = _SYNC.recompute_kv
    sync_s: float = _TIMEOUTS.weight_sync_s
    rpc_s: float = _TIMEOUTS.rpc_s
    restart_s: float = _TIMEOUTS.engine_start_s
    restarts: int = _SYNC.restarts

    @classmethod
    def from_config(cls, config: Config) -> SyncSettings:
        """Read the options from a config."""
        return cls(
            bucket_bytes=int(config.weight_sync.bucket_mb * 2**20),
            transport=config.weight_sync.transport,
            recompute_kv=config.weight_sync.recompute_kv,
            sync_s=config.timeouts.weight_sync_s,
            rpc_s=config.timeouts.rpc_s,
            restart_s=config.timeouts.engine_start_s,
            restarts=config.weight_sync.restarts,
        )

    @property
    def backend(self) -> str:
        """The process group's backend, `nccl` or `gloo`."""
        if self.transport != "auto":
            return self.transport
        return "nccl" if torch.cuda.is_available() else "gloo"


class WeightSender:
    """Publishes the trainer's weights to all engines. Create it, and call `connect` and `publish`, on every rank."""

    def __init__(self, config: Config | SyncSettings, exporter: Exporter, *, host: str | None = None) -> None:
        """`host`: an address of rank 0 that the engines can reach; None: `reachable_address()`."""
        self.settings = config if isinstance(config, SyncSettings) else SyncSettings.from_config(config)
        self._exporter = exporter
        self._host = host
        distributed = torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._world = torch.distributed.get_world_size() if distributed else 1
        self._plan: BucketPlan | None = None
        self._numbers: dict[str, int] = {}
        self._store: SyncStore | None = None
        self._engines: EngineCalls | None = None
        self._group: Group | None = None
        self._buffers: SendBuffers | None = None
        self._generation = -1
        self._formed = False
        self._sync = 0

    @property
    def plan(self) -> BucketPlan:
        """The plan, which `connect` makes. Raises RuntimeError before that."""
        if self._plan is None:
            raise RuntimeError("WeightSender.connect has not been called")
        return self._plan

    def connect(self, pool: EngineHandles | None) -> None:
        """Make the plan and form the group with all engine workers. Collective. Rank 0 passes the pool, others None.

        Raises:
            ValueError: the pool is missing on rank 0, or passed on another rank.
            WeightSyncError: an engine worker did not join; the error names it.
        """
        if (pool is None) == (self._rank == 0):
            raise ValueError("WeightSender.connect needs the pool on trainer rank 0 and None on all other ranks")
        self._plan = make_plan(self._exporter.manifest(), self.settings.bucket_bytes)
        self._numbers = {spec.name: number for number, spec in enumerate(self._plan.specs)}
        self._store = self._open_store()
        if pool is not None:
            self._engines = EngineCalls(pool, self.settings.rpc_s, self.settings.recompute_kv)
        if self._rank in self._plan.owners:
            device = torch.device("cuda" if self.settings.backend == "nccl" else "cpu")
            self._buffers = SendBuffers(self._plan, self._rank, device)
        try:
            self._form_group()
        except WeightSyncError as error:
            if not error.needs_restart or self.settings.restarts == 0:
                raise
            logger.warning("restarting %s: %s", ", ".join(error.needs_restart), error)
            self._form_group(restart=error.needs_restart)

    def publish(self, version: int) -> SyncReport:
        """Make every replica serve `version`, with weights bit-identical to those that the exporter yields. Collective.

        Replicas that a failed sync left between start and finish are restarted, and the sync is repeated, at most
        `settings.restarts` times.

        Raises:
            WeightSyncError: on every rank, with the members that failed. No replica then serves the version.
        """
        if not self._formed:  # the last publish raised; its caller is responsible for the replicas that failed
            self._form_group()
        restarted: tuple[str, ...] = ()
        for attempt in range(self.settings.restarts + 1):
            outcome = self._attempt(version, may_repeat=attempt < self.settings.restarts)
            if outcome["status"] == "published":
                return SyncReport(**{**outcome["report"], "restarted": restarted})
            if outcome["status"] == "failed":
                break
            restarted = (*restarted, *outcome["needs_restart"])
            logger.warning("repeating the sync with new replicas: %s", outcome["message"])
            self._form_group(restart=outcome["needs_restart"])
        raise WeightSyncError(
            outcome["message"],
            version=version,
            failed_members=outcome["failed_members"],
            needs_restart=outcome["needs_restart"],
        )

    def close(self) -> None:
        """Leave the group. The engines keep their weights."""
        if self._group is not None:
            self._group.close()
        self._group = self._buffers = None
        self._formed = False

    def _open_store(self) -> SyncStore:
        """Open the sync's store: rank 0 serves it, and sends its address to the other ranks."""
        global _serial
        _serial += 1
        key = f"megarl/weights/{_serial}"
        if self._rank == 0:
            store = SyncStore(self._host or reachable_address(), 0, server=True)
            if self._world > 1:
                _default_store().set(key, json.dumps([store.host, store.port]))
            return store
        rendezvous = _default_store()
        rendezvous.wait([key], timedelta(seconds=self.settings.rpc_s))
        host, port = json.loads(rendezvous.get(key))
        return SyncStore(host, port)

    def _form_group(self, restart: Sequence[str] = ()) -> None:
        """Form the next generation's group; restart the replicas `restart` first. Collective.

        Raises WeightSyncError on every rank if that fails.
        """
        assert self._store is not None
        self._generation += 1
        key = f"g{self._generation}/formed"
        error: WeightSyncError | None = None
        try:
            self._join(self._agree_on_members(restart))
        except WeightSyncError as failure:
            error = failure
        except Exception as failure:
            error = WeightSyncError(f"the weight-sync group could not be formed: {failure}")
            error.__cause__ = failure
        if self._engines is not None:
            fields = None if error is None else [str(error), error.failed_members, error.needs_restart]
            self._store.put(key, {"error": fields})
        else:
            wait_s = 2 * self.settings.rpc_s
            formed = self._store.wait(key, wait_s, "trainer rank 0 to form the weight-sync group")
            if formed["error"] is not None:
                message, failed_members, needs_restart = formed["error"]
                error = WeightSyncError(message, failed_members=failed_members, needs_restart=needs_restart)
        self._formed = error is None
        if error is not None:
            self._leave_group()
            raise error

    def _agree_on_members(self, restart: Sequence[str]) -> GroupMembers:
        """Return the members of the next generation, which rank 0 finds out and sends to the other ranks."""
        assert self._store is not None
        key = f"g{self._generation}/members"
        if self._engines is None:
            wait_s = 2 * self.settings.rpc_s + (self.settings.restart_s if restart else 0.0)
            answer = self._store.wait(key, wait_s, "trainer rank 0 to reach all engine replicas")
            if "error" in answer:
                raise WeightSyncError(answer["error"])
            return GroupMembers.from_json(answer["members"])
        try:
            if restart:
                self._engines.handles.restart(restart, self.settings.restart_s)
            members = self._engines.members(self._generation, self.plan.owners, self.settings.backend)
        except Exception as error:
            self._store.put(key, {"error": str(error)})
            raise
        self._store.put(key, {"members": members.to_json()})
        return members

    def _join(self, members: GroupMembers) -> None:
        """Join the group if this rank sends. On the leader, also make the engines join, in parallel."""
        assert self._store is not None
        sends = self._rank in members.senders
        rank = members.senders.index(self._rank) if sends else None
        self._group = Group(self._store, members, rank) if sends or self._engines is not None else None
        timeout_s = self.settings.rpc_s
        engines = None
        if self._engines is not None:
            engines = _Background(self._engines.connect, self._store, members, self.plan, timeout_s)
        try:
            if sends:
                assert self._group is not None
                self._group.join(timeout_s)
        except SyncAborted:
            if engines is not None:
                engines.result()  # this raises a more precise error: which engine failed, and how
            raise
        except Exception as error:
            assert self._group is not None
            self._group.post_abort(str(error))
            if isinstance(error, WeightSyncError):
                error.needs_restart = tuple(names_of(members, error.failed_members))
            raise
        if engines is not None:
            engines.result()

    def _attempt(self, version: int, may_repeat: bool) -> dict[str, Any]:
        """Make one attempt to publish. Return its outcome, which the leader determines for all ranks."""
        if self._store is None or self._plan is None:
            raise RuntimeError("WeightSender.connect has not been called")
        sync, self._sync = self._sync, self._sync + 1
        key = f"g{self._generation}/outcome/{sync}"
        group, started = self._group, time.perf_counter()
        if group is not None:
            group.begin(sync, len(self._plan.buckets), self.settings.sync_s)
        engines = None
        if self._engines is not None:
            assert group is not None
            limit = self.settings.sync_s
            engines = _Background(self._engines.publish, group, self._plan, sync, version, limit)
        sending = None
        if group is not None and self._buffers is not None:
            sending = Sending(group, self._plan, self._rank, version, self._buffers)
        error = self._walk(sending)
        if engines is None:
            wait_s = self.settings.sync_s + 3 * self.settings.rpc_s
            outcome = self._store.wait(key, wait_s, f"trainer rank 0 to end the sync of version {version}")
        else:
            outcome = self._outcome(engines, error, may_repeat, time.perf_counter() - started)
            self._store.put(key, outcome)
        if outcome["status"] != "published":
            self._leave_group()
        if error is not None:
            raise error
        return outcome

    def _walk(self, sending: Sending | None) -> BaseException | None:
        """Take part in all gathers of this rank, and send the tensors it owns. Return this process's error, if any."""
        try:
            with torch.no_grad():
                for item, tensor in self._exporter.stream():
                    if tensor is not None and sending is not None:
                        sending.offer(self._numbers[item.name], tensor)
            if sending is not None:
                sending.finish()
        except Exception as error:
            if sending is not None:
                sending.fail(error)
            elif self._group is None and self._store is not None:
                self._store.put(f"g{self._generation}/abort", f"trainer rank {self._rank}: {error}")
            return error
        return None

    def _outcome(
        self, engines: _Background[SyncReport], error: BaseException | None, may_repeat: bool, seconds: float
    ) -> dict[str, Any]:
        """Wait for the engines, and return the outcome as JSON. `error`: this process's own; `seconds`: since start."""
        assert self._engines is not None
        try:
            report = engines.result()
        except WeightSyncError as failure:
            mine = any(member.startswith("trainer rank") for member in failure.failed_members)
            repeat = may_repeat and not mine and error is None and bool(failure.needs_restart)
            self._engines.after_failure(failure)
            return {
                "status": "repeat" if repeat else "failed",
                "message": str(failure),
                "failed_members": failure.failed_members,
                "needs_restart": failure.needs_restart,
            }
        except Exception as failure:
            return {
                "status": "failed",
                "message": f"weight sync: {failure!r}",
                "failed_members": [],
                "needs_restart": [],
            }
        fields = asdict(report)
        return {"status": "published", "report": {**fields, "seconds": max(seconds, report.seconds)}}

    def _leave_group(self) -> None:
        """Leave this generation after a failure, and replace the buffers, which running broadcasts may still read."""
        self._formed = False
        if self._group is not None:
            self._group.abort()
            self._group = None
        if self._buffers is not None:
            self._buffers = SendBuffers(self.plan, self._rank, self._buffers.scratch_B.device)


class _Background(Generic[T]):
    """A call in a daemon thread. The call must have a deadline of its own."""

    def __init__(self, function: Callable[..., T], *args: object) -> None:
        self._value: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., T], args: tuple[object, ...]) -> None:
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Wait until the call has ended. Return its result or raise its exception."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def _default_store() -> Store:
    """Return the trainer ranks' rendezvous store: it exists for any backend, and its waits have a timeout."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def reachable_address() -> str:
    """Return an address of this host that the engines can reach: Ray's, or 127.0.0.1 if Ray is not connected."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return "127.0.0.1"
