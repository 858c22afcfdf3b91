"""The trainer's part of a weight sync. `publish` is collective over all trainer ranks.

There are three roles, often in one process. Ranks that hold parts of tensors take part in gathers, ranks that own
tensors also pack them into buckets and broadcast these (`sending.py`). The leader, rank 0, calls the engines in a
second thread, through `replica_calls.py`, once it has staged its first buckets, and sends the outcome to all ranks. If
engines failed, the trainer ranks complete the gathers that are left, so that their groups stay in step and the sync can
be repeated.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import DistNetworkError, Store

from megarl.common.bound_store import NODE_ADDRESS_VARIABLE
from megarl.common.byte_units import GIB, MIB
from megarl.common.errors import PeerTimeout, SyncAborted, WeightSyncError
from megarl.common.run_secret import run_secret
from megarl.config.schema import Config, TimeoutsConfig, WeightSyncConfig
from megarl.models.gather import GatherRequest
from megarl.telemetry import events
from megarl.weights.backends import BACKENDS
from megarl.weights.background_call import BackgroundCall
from megarl.weights.bucket_packer import BucketPacker
from megarl.weights.buckets import RELOAD_LAYER_SPAN, BucketPlan, ManifestEntry, bucket_plan
from megarl.weights.handles import EngineHandles
from megarl.weights.operation_order import Order, buffers_within, schedule
from megarl.weights.replica_calls import EngineCalls, SyncReport
from megarl.weights.sending import RowGather, Sending
from megarl.weights.store import SyncStore, open_shared_store
from megarl.weights.transport import Group, GroupMembers, await_members, end_forming, names_of
from megarl.weights.watch import end_key

logger = logging.getLogger(__name__)
_serial = 0
_SYNC, _TIMEOUTS = WeightSyncConfig(), TimeoutsConfig()


class Exporter(Protocol):
    """The methods of `megarl.models.export.HFExporter` that a sync uses."""

    def manifest(self) -> Sequence[ManifestEntry]:
        """Return all tensors of the model in layer order, equal on all ranks. The first call is a world collective."""

    def connect(self, timeout_s: float) -> None:
        """Connect the ranks that exchange messages in gathers. Raises PeerTimeout if one does not come in time."""

    def gathers(self, requests: Sequence[GatherRequest], device: torch.device) -> Sequence[RowGather | None]:
        """Return this rank's part in each request's gather, None where it has none. `device`: that of the targets."""


@dataclass(frozen=True)
class SyncSettings:
    """The options of a sync; `_s` in seconds, `_bytes` in bytes. The defaults are those of the config."""

    bucket_bytes: int = int(_SYNC.bucket_mb * MIB)
    staging_bytes: int = int(_SYNC.staging_gib * GIB)
    transport: str = _SYNC.transport
    recompute_kv: bool = _SYNC.recompute_kv
    sync_s: float = _TIMEOUTS.weight_sync_s
    rpc_s: float = _TIMEOUTS.rpc_s
    restart_s: float = _TIMEOUTS.engine_start_s
    restarts: int = _SYNC.restarts
    # The directory of the run, whose secret the trainer ranks have in common. A single rank needs none.
    run_dir: Path | None = None

    @classmethod
    def from_config(cls, config: Config) -> SyncSettings:
        """Read the options from a config."""
        return cls(
            bucket_bytes=int(config.weight_sync.bucket_mb * MIB),
            staging_bytes=int(config.weight_sync.staging_gib * GIB),
            transport=config.weight_sync.transport,
            recompute_kv=config.weight_sync.recompute_kv,
            sync_s=config.timeouts.weight_sync_s,
            rpc_s=config.timeouts.rpc_s,
            restart_s=config.timeouts.engine_start_s,
            restarts=config.weight_sync.restarts,
            run_dir=config.run_dir,
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
        """`host`: the address at which rank 0 serves the store; None: `store_address` or `reachable_address`."""
        self.settings = config if isinstance(config, SyncSettings) else SyncSettings.from_config(config)
        self._exporter = exporter
        self._host = host or (None if isinstance(config, SyncSettings) else store_address(config))
        distributed = torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._world = torch.distributed.get_world_size() if distributed else 1
        self._plan: BucketPlan | None = None
        self._store: SyncStore | None = None
        self._engines: EngineCalls | None = None
        self._group: Group | None = None
        self._packer: BucketPacker | None = None
        self._order: Order = ()
        self._gathers: Sequence[RowGather | None] = ()
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
        self._plan = bucket_plan(self._exporter.manifest(), self.settings.bucket_bytes)
        self._store = self._open_store()
        if pool is not None:
            settings = self.settings
            own = self._store.connection()
            self._engines = EngineCalls(pool, own, self._world, settings.rpc_s, settings.recompute_kv)
        self._form_whole_group()

    def publish(self, version: int, keep: Collection[str] = ()) -> SyncReport:
        """Make every replica serve `version`, with weights bit-identical to those that the exporter yields. Collective.

        `keep`: the names of replicas that are left out, and keep their weights and their version; read on rank 0 only.
        One that has to be restarted gets the weights. If replicas have joined or left the pool since the last sync, the
        group is formed anew first.

        A sync that engines make fail is repeated, at most `settings.restarts` times. The engines that failed are
        replaced. Those that had begun to load when others failed give that up and load everything again; they do not
        wait for the new ones, which then join with a later sync.

        Raises:
            WeightSyncError: on every rank, with the members that failed. No replica then serves the version.
        """
        if not self._formed:  # the last publish raised; its caller is responsible for the replicas that failed
            self._form_group()
        elif self._members_differ():
            self.close()
            self._form_whole_group()
        restarted: tuple[str, ...] = ()
        begun = time.monotonic()
        for attempt in range(self.settings.restarts + 1):
            outcome = self._attempt(version, set(keep) - set(restarted), may_repeat=attempt < self.settings.restarts)
            if outcome["status"] == "published":
                report = SyncReport(**{**outcome["report"], "restarted": restarted})
                self._record(report, begun)
                return report
            if outcome["status"] == "failed":
                break
            restarted = (*restarted, *outcome["needs_restart"])
            if self._rank == 0:
                events.fault("sync", outcome["message"])
            logger.warning("repeating the sync in another group: %s", outcome["message"])
            self._form_group(replace=outcome["needs_restart"], later=outcome["interrupted"])
        raise WeightSyncError(
            outcome["message"],
            version=version,
            failed_members=outcome["failed_members"],
            needs_restart=outcome["needs_restart"],
        )

    def _record(self, report: SyncReport, begun: float) -> None:
        """Record a publication, on the leader. `begun`: the beginning of its first attempt, by `time.monotonic`."""
        if self._rank == 0:
            version, names = report.version, ", ".join(report.restarted)
            args: dict[str, str | int | float] = {"bytes": report.bytes}
            if names:
                args["restarted"] = names
            events.record("publication", begun, time.monotonic(), key=version, version=version, args=args)
            if names:
                events.recovery("sync", f"version {version} is published without what failed: {names}")

    def close(self) -> None:
        """Leave the group. The engines keep their weights."""
        if self._group is not None:
            self._group.close()
        self._group = self._packer = None
        self._gathers = ()
        self._formed = False

    def _lay_out_buckets(self, layer_span: int | None) -> None:
        """Make the plan, the order of operations, this rank's buffers and its part of every bucket's gather.

        `layer_span`: see `bucket_plan`.
        """
        if layer_span != self.plan.layer_span:
            self._plan = bucket_plan(self.plan.specs, self.settings.bucket_bytes, layer_span)
        backend = self.settings.backend
        device = torch.device(BACKENDS[backend].device)
        buffers = buffers_within(self.plan, self.settings.staging_bytes)  # the same on all ranks
        packer = BucketPacker(self.plan, self._rank, device, buffers)
        self._order = schedule(self.plan, buffers)
        # The exporter is told the order of the gathers: in each second one a rank sends from the same memory.
        requests = packer.requests()
        gathered = [operation.bucket.index for operation in self._order if operation.kind == "gather"]
        gathers = self._exporter.gathers([requests[index] for index in gathered], device)
        by_bucket = dict(zip(gathered, gathers, strict=True))
        self._gathers = [by_bucket[bucket.index] for bucket in self.plan.buckets]
        self._packer = packer if self._rank in self.plan.owners else None

    def _open_store(self) -> SyncStore:
        """Open the sync's store, which rank 0 serves."""
        global _serial
        _serial += 1
        host = (self._host or reachable_address()) if self._rank == 0 else None
        if self._world == 1:
            assert host is not None
            return SyncStore(host, 0, server=True)
        if self.settings.run_dir is None:
            raise ValueError("SyncSettings.run_dir is needed with several trainer ranks: its secret authenticates them")
        name = f"weights/{_serial}"
        wait_s = self.settings.rpc_s
        return open_shared_store(name, run_secret(self.settings.run_dir), host, lambda text: _share(name, text, wait_s))

    def _form_group(self, replace: Sequence[str] = (), *, later: bool = False) -> None:
        """Form the next generation's group; replace these replicas first, or `later` without waiting. Collective.

        Raises WeightSyncError on every rank if that fails.
        """
        assert self._store is not None
        self._generation += 1
        key = f"g{self._generation}/formed"
        error: WeightSyncError | None = None
        in_place = False
        try:
            in_place = self._join(self._agree_on_members(replace, later))
        except WeightSyncError as failure:
            error = failure
        except Exception as failure:
            error = WeightSyncError(f"the weight-sync group could not be formed: {failure}")
            error.__cause__ = failure
        if self._engines is not None:
            fields = None if error is None else [str(error), error.failed_members, error.needs_restart]
            end_forming(self._store, self._generation, None if error is None else str(error))
            self._store.put(key, {"error": fields, "in_place": in_place})
        else:
            wait_s = 2 * self.settings.rpc_s
            formed = self._store.wait(key, wait_s, "trainer rank 0 to form the weight-sync group")
            in_place = formed["in_place"]
            if formed["error"] is not None:
                message, failed_members, needs_restart = formed["error"]
                error = WeightSyncError(message, failed_members=failed_members, needs_restart=needs_restart)
        self._formed = error is None
        if error is not None:
            self._leave_group()
            raise error
        self._lay_out_buckets(None if in_place else RELOAD_LAYER_SPAN)

    def _form_whole_group(self) -> None:
        """Form the next generation's group; if replicas fail to join, restart them and try once more. Collective."""
        try:
            self._form_group()
        except WeightSyncError as error:
            if not error.needs_restart or self.settings.restarts == 0:
                raise
            logger.warning("restarting %s: %s", ", ".join(error.needs_restart), error)
            self._form_group(replace=error.needs_restart)

    @property
    def _controller_s(self) -> float:
        """Seconds in which rank 0 reaches the controller, which may have to be found dead and started anew first."""
        return 8 * self.settings.rpc_s + self.settings.restart_s

    def _members_differ(self) -> bool:
        """Tell whether the replicas of the pool are others than those of the group. Collective; rank 0 asks the pool.

        Raises WeightSyncError on every rank if the pool does not answer.
        """
        assert self._store is not None and self._group is not None
        key = f"g{self._generation}/s{self._sync}/members"
        if self._engines is None:
            wait_s = self._controller_s
            answer = self._store.block(key, wait_s)
            if answer is None:
                waited = f"trainer rank {self._rank} waited {wait_s:.0f} s"
                raise PeerTimeout(f"{waited} for trainer rank 0 to ask which replicas there are")
        else:
            answer = self._ask_for_members(self._engines, self._group.members)
            if self._world > 1:
                self._store.put(key, answer)
                self._store.drop(f"g{self._generation}/s{self._sync - 3}/members")  # every rank has read that one
        if answer["error"] is not None:
            raise WeightSyncError(f"the replicas of the pool are not known: {answer['error']}")
        return bool(answer["differ"])

    def _ask_for_members(self, engines: EngineCalls, members: GroupMembers) -> dict[str, Any]:
        try:
            return {"differ": tuple(engines.handles.names()) != members.replicas, "error": None}
        except Exception as error:
            return {"differ": False, "error": f"{error}"}

    def _agree_on_members(self, replace: Sequence[str], later: bool) -> GroupMembers:
        """Return the members of the next generation, which rank 0 finds out and sends to the other ranks."""
        assert self._store is not None
        key = f"g{self._generation}/members"
        if self._engines is None:
            wait_s = self._controller_s + (self.settings.restart_s if replace else 0.0)
            answer = self._store.wait(key, wait_s, "trainer rank 0 to reach all engine replicas")
            if "error" in answer:
                raise WeightSyncError(answer["error"])
            return GroupMembers.from_json(answer["members"])
        try:
            if replace:
                handles = self._engines.handles
                (handles.replace_later if later else handles.restart)(replace, self.settings.restart_s)
            owners, settings = self.plan.owners, self.settings
            members = self._engines.members(self._generation, owners, settings.backend, settings.sync_s)
        except Exception as error:
            self._store.put(key, {"error": str(error)})
            raise
        self._store.put(key, {"members": members.to_json()})
        return members

    def _join(self, members: GroupMembers) -> bool:
        """Join the group if this rank sends. On the leader, also make the engines join, and wait for all members.

        Returns whether all engine workers load in place, which only the leader knows.
        """
        assert self._store is not None
        sends = self._rank in members.senders
        rank = members.senders.index(self._rank) if sends else None
        self._group = Group(self._store, members, rank, f"trainer rank {self._rank}")
        timeout_s = self.settings.rpc_s
        leading: list[BackgroundCall[Any]] = []
        if self._engines is not None:
            leading = [
                BackgroundCall(await_members, self._store.connection(), members, timeout_s),
                BackgroundCall(self._engines.connect, members, self.plan, timeout_s),
            ]
        error: Exception | None = None
        try:
            self._exporter.connect(0.9 * timeout_s)  # ends before the leader's wait for all members
            if sends:
                self._group.join(timeout_s)
        except Exception as failure:
            error = failure
            if not isinstance(failure, SyncAborted):
                end_forming(self._store, members.generation, f"{self._group.name}: {failure}")
        answers = []
        for each in leading:  # their errors are more precise: who did not come, which engine failed, and how
            try:
                answers.append(each.result())
            except WeightSyncError as failure:
                if failure.failed_members and not failure.needs_restart:
                    failure.needs_restart = tuple(names_of(members, failure.failed_members))
                raise
        if error is not None:
            raise error
        return bool(answers and answers[0])

    def _attempt(self, version: int, keep: Collection[str], may_repeat: bool) -> dict[str, Any]:
        """Make one attempt to publish. Return its outcome, which the leader determines for all ranks."""
        if self._store is None or self._group is None:
            raise RuntimeError("WeightSender.connect has not been called")
        sync, self._sync = self._sync, self._sync + 1
        group, started, limit_s = self._group, time.perf_counter(), self.settings.sync_s
        group.begin(sync, len(self.plan.buckets), limit_s)
        sending = Sending(group, self._order, self._gathers, self._packer, self._rank, version)
        engines = None
        if self._engines is not None:
            publish = self._engines.publish
            engines = BackgroundCall(publish, group, self.plan, sync, version, limit_s, sending.staged, keep)
        error: Exception | None = None
        try:
            sending.run()
        except Exception as failure:
            error = failure
        if engines is None:
            outcome = self._await_outcome(version)
        else:
            outcome = self._end(engines, error, may_repeat, time.perf_counter() - started)
        if outcome["status"] == "published":
            if error is not None:  # all others have the version; this rank left the group when it failed
                self._leave_group()
                raise error
            return outcome
        try:
            if not any(name.startswith("trainer rank") for name in outcome["failed_members"]):
                sending.finish_gathers(self.settings.rpc_s)
        except WeightSyncError as failure:
            outcome = {**outcome, "status": "failed", "message": f"{outcome['message']}; then {failure}"}
        self._leave_group()
        if error is not None and not isinstance(error, WeightSyncError):
            raise error
        return outcome

    def _await_outcome(self, version: int) -> dict[str, Any]:
        """Wait until the leader has ended the sync, and return its outcome."""
        assert self._group is not None and self._store is not None
        group, what = self._group, f"trainer rank 0 to end the sync of version {version}"
        wait_s = self.settings.sync_s + 3 * self.settings.rpc_s
        end = group.wait_end(wait_s)
        if end is None:
            raise PeerTimeout(f"trainer rank {self._rank} waited {wait_s:.0f} s for {what}")
        if "abort" in end:  # the leader finds the cause, and releases the engines
            try:
                return dict(self._store.wait(group.key("outcome"), 3 * self.settings.rpc_s, what))
            except DistNetworkError as error:
                raise WeightSyncError(end["abort"], version=version, failed_members=["trainer rank 0"]) from error
        return dict(end)

    def _end(
        self, engines: BackgroundCall[SyncReport], error: Exception | None, may_repeat: bool, seconds: float
    ) -> dict[str, Any]:
        """On the leader, wait for the engines and end the sync for all members. Return the outcome."""
        assert self._store is not None and self._group is not None and self._engines is not None
        stage = self._group.stage
        outcome = self._outcome(engines, error, may_repeat, seconds)
        if outcome["status"] == "published":
            end = self._store.put_once(end_key(stage), outcome)
        else:
            self._group.post_abort(outcome["message"])
            end = {"abort": outcome["message"]}
        if "abort" in end:
            self._store.put(self._group.key("outcome"), outcome)
        self._engines.forget(self._group, stage)
        # Every member has seen the end of the sync before the last one.
        self._store.drop(end_key(f"g{self._generation}/s{self._sync - 3}"))
        return outcome

    def _outcome(
        self, engines: BackgroundCall[SyncReport], error: Exception | None, may_repeat: bool, seconds: float
    ) -> dict[str, Any]:
        """Wait for the engines, and return the outcome as JSON. `error`: this process's own; `seconds`: since start."""
        assert self._engines is not None
        try:
            report = engines.result()
        except WeightSyncError as failure:
            mine = any(member.startswith("trainer rank") for member in failure.failed_members)
            own = error is not None and not isinstance(error, WeightSyncError)
            repeat = may_repeat and not mine and not own and bool(failure.needs_restart)
            replaced = self._engines.after_failure(failure, repeats=repeat)
            return {
                "status": "repeat" if repeat else "failed",
                "message": str(failure),
                "failed_members": failure.failed_members,
                "needs_restart": replaced,
                "interrupted": bool(set(failure.interrupted) - set(replaced)),
            }
        except Exception as failure:
            outcome = {"status": "failed", "message": f"weight sync: {failure!r}"}
            return {**outcome, "failed_members": [], "needs_restart": [], "interrupted": False}
        fields = asdict(report)
        return {"status": "published", "report": {**fields, "seconds": max(seconds, report.seconds)}}

    def _leave_group(self) -> None:
        """Leave this generation after a failure, and its buffers, which running broadcasts may still read."""
        self._formed = False
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._packer, self._gathers = None, ()


def _default_store() -> Store:
    """Return the trainer ranks' rendezvous store: it exists for any backend, and its waits have a timeout."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _share(name: str, text: str | None, wait_s: float) -> str:
    """Give rank 0's text to all trainer ranks over their rendezvous store, and return it."""
    rendezvous = _default_store()
    if text is not None:
        rendezvous.set(name, text)
        return text
    rendezvous.wait([name], timedelta(seconds=wait_s))
    return rendezvous.get(name).decode()


def store_address(config: Config) -> str:
    """Return the address at which this process serves a store: that of its node, as the node's agent has set it.

    Without an agent the run has one node, so it is 127.0.0.1, unless the engines are in a Ray cluster of the user's.
    """
    address = os.environ.get(NODE_ADDRESS_VARIABLE)
    if address is not None:
        return address
    return "127.0.0.1" if config.ray.address is None else reachable_address()


def reachable_address() -> str:
    """Return an address of this host that the engines can reach: Ray's, or 127.0.0.1 if Ray is not connected."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return "127.0.0.1"
