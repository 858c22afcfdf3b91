"""The trainer's part of a weight sync. `publish` is collective over all trainer ranks.

There are three roles, often in one process. Ranks that hold parts of tensors take part in gathers, ranks that own
tensors also pack them into buckets and broadcast these (`sync_attempt.py`). The leader, rank 0, calls the engines in a
second thread, through `leader.py`, once it has staged its first buckets, and sends the outcome to all ranks. If
engines failed, the trainer ranks complete the gathers that are left, so that their groups stay in step and the sync can
be repeated. The members of each sync are a group that `group_former.py` forms.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch.distributed import DistNetworkError

from megarl.common.errors import PeerTimeout, WeightSyncError
from megarl.common.process.threads import call_in_thread
from megarl.config.schema import Config
from megarl.models.hf.gather import GatherRequest
from megarl.telemetry.trace import events
from megarl.weights.group.backends import BACKENDS
from megarl.weights.group.protocols import EngineHandles
from megarl.weights.group.stage_end import end_key
from megarl.weights.group.store import SyncStore
from megarl.weights.group.trainer_store import open_trainer_store, reachable_address, store_address
from megarl.weights.group.transport import Group
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import RELOAD_LAYER_SPAN, BucketPlan, ManifestEntry, bucket_plan
from megarl.weights.plan.operation_order import Order, buffers_within, schedule
from megarl.weights.plan.settings import SyncReport, SyncSettings
from megarl.weights.send.group_former import GroupFormer
from megarl.weights.send.leader import EngineCalls
from megarl.weights.send.sync_attempt import RowGather, SyncAttempt

logger = logging.getLogger(__name__)


class Exporter(Protocol):
    """The methods of `megarl.models.hf.export.HFExporter` that a sync uses."""

    def manifest(self) -> Sequence[ManifestEntry]:
        """Return all tensors of the model in layer order, equal on all ranks. The first call is a world collective."""

    def connect(self, timeout_s: float) -> None:
        """Connect the ranks that exchange messages in gathers. Raises PeerTimeout if one does not come in time."""

    def gathers(self, requests: Sequence[GatherRequest], device: torch.device) -> Sequence[RowGather | None]:
        """Return this rank's part in each request's gather, None where it has none. `device`: that of the targets."""


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
        self._former: GroupFormer | None = None
        self._group: Group | None = None
        self._packer: BucketPacker | None = None
        self._order: Order = ()
        self._gathers: Sequence[RowGather | None] = ()
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
        settings, rank, world = self.settings, self._rank, self._world
        host = (self._host or reachable_address()) if rank == 0 else None
        store = self._store = open_trainer_store(settings, host, world)
        if pool is not None:
            self._engines = EngineCalls(pool, store.connection(), world, settings.rpc_s, settings.recompute_kv)
        self._former = GroupFormer(settings, store, self._engines, rank, world, self._exporter.connect)
        self._form()

    def publish(self, version: int) -> SyncReport:
        """Make every replica serve `version`, with weights bit-identical to those that the exporter yields. Collective.

        If replicas have joined or left the pool since the last sync, the group is formed again first.

        A sync that engines make fail is repeated, at most `settings.restarts` times. The engines that failed are
        replaced. Those that had begun to load when others failed give that up and load everything again; they do not
        wait for the new ones, which then join with a later sync.

        Raises:
            WeightSyncError: on every rank, with the members that failed. No replica then serves the version.
        """
        if self._former is None:
            raise RuntimeError("WeightSender.connect has not been called")
        restarted: tuple[str, ...] = ()
        if self._group is None or self._former.members_differ(self._group.members, self._sync):
            self.close()
            restarted = self._form()
        begun = time.monotonic()
        for attempt in range(self.settings.restarts + 1):
            outcome = self._attempt(version, may_repeat=attempt < self.settings.restarts)
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
            restarted += self._form(outcome["needs_restart"], later=outcome["later"])
        raise WeightSyncError(
            outcome["message"],
            version=version,
            failed_members=outcome["failed_members"],
            needs_restart=outcome["needs_restart"],
        )

    def _form(self, replace: Sequence[str] = (), *, later: bool = False) -> tuple[str, ...]:
        """Form the next group (`GroupFormer.form`) and enter it; return the replicas that were restarted for that."""
        assert self._former is not None
        self._group, in_place, restarted = self._former.form(self.plan, replace, later=later)
        self._lay_out_buckets(None if in_place else RELOAD_LAYER_SPAN)
        return restarted

    def _record(self, report: SyncReport, begun: float) -> None:
        """Record a publication, on the leader. `begun`: the beginning of its first attempt, by `time.monotonic`."""
        if self._rank == 0:
            version, names = report.version, ", ".join(report.restarted)
            args: dict[str, str | int | float] = {"bytes": report.bytes}
            if names:
                args["restarted"] = names
            events.record("publication", begun, time.monotonic(), version=version, args=args)
            if names:
                events.recovery("sync", f"version {version} is published without what failed: {names}")

    def close(self) -> None:
        """Leave the group. The engines keep their weights."""
        if self._group is not None:
            self._group.close()
        self._group = self._packer = None
        self._gathers = ()

    def _lay_out_buckets(self, layer_span: int | None) -> None:
        """Make the plan, the order of operations, this rank's buffers and its part of every bucket's gather.

        `layer_span`: the most layers whose tensors may be incomplete at once, None for any number.
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

    def _attempt(self, version: int, may_repeat: bool) -> dict[str, Any]:
        """Make one attempt to publish. Return its outcome, which the leader determines for all ranks."""
        if self._store is None or self._group is None:
            raise RuntimeError("WeightSender.connect has not been called")
        sync, self._sync = self._sync, self._sync + 1
        group, started, limit_s = self._group, time.perf_counter(), self.settings.sync_s
        group.begin(sync, len(self.plan.buckets), limit_s)
        sending = SyncAttempt(group, self._order, self._gathers, self._packer, self._rank, version)
        engines = None
        if self._engines is not None:
            publish = self._engines.publish
            engines = call_in_thread(publish, group, self.plan, sync, version, limit_s, sending.staged)
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
        self, engines: Future[SyncReport], error: Exception | None, may_repeat: bool, seconds: float
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
        self._store.drop(end_key(f"g{self._group.members.generation}/s{self._sync - 3}"))
        return outcome

    def _outcome(
        self, engines: Future[SyncReport], error: Exception | None, may_repeat: bool, seconds: float
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
            names = ", ".join(replaced) or "none"
            return {
                "status": "repeat" if repeat else "failed",
                "message": f"{failure}. The version is not published; replicas to replace: {names}",
                "failed_members": failure.failed_members,
                "needs_restart": replaced,
                "later": self._engines.loading,
            }
        except Exception as failure:
            outcome = {"status": "failed", "message": f"weight sync: {failure!r}"}
            return {**outcome, "failed_members": [], "needs_restart": []}
        fields = asdict(report)
        return {"status": "published", "report": {**fields, "seconds": max(seconds, report.seconds)}}

    def _leave_group(self) -> None:
        """Leave this generation after a failure, and its buffers, which running broadcasts may still read."""
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._packer, self._gathers = None, ()
