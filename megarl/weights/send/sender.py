"""The trainer's part of a weight sync. `publish` is collective over all trainer ranks.

There are three roles, often in one process. Ranks that hold parts of tensors take part in gathers. Ranks that own
tensors also pack them into buckets and broadcast these (`sync_attempt.py`). The leader, rank 0, calls the engines from
a second thread (`leader.py`) once it has staged its first buckets, and sends the outcome to all ranks. If engines
failed, the trainer ranks complete the remaining gathers, so their groups stay in step and the sync can be repeated.

The members of a sync form a group: the ranks that own tensors, and all engine workers. To form a new generation the
leader asks the pool for its replicas, has failed ones replaced, and sends all members' names to all ranks. Sending
ranks join the group while the leader makes the engines join, and all learn the outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistNetworkError

from megarl.common.errors import PeerTimeout, SyncAborted, WeightSyncError
from megarl.common.process.threads import call_in_thread
from megarl.common.values import JsonValue
from megarl.telemetry.trace import events
from megarl.weights.group.backends import BACKENDS
from megarl.weights.group.protocols import EngineHandles
from megarl.weights.group.stage import end_key
from megarl.weights.group.store import SyncStore, open_trainer_store, reachable_address
from megarl.weights.group.transport import Group, GroupMembers, await_members, end_forming, names_of
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import RELOAD_LAYER_SPAN, BucketPlan, Order, bucket_plan, schedule
from megarl.weights.plan.settings import SyncReport, SyncSettings
from megarl.weights.send.leader import EngineCalls
from megarl.weights.send.sync_attempt import SyncAttempt

if TYPE_CHECKING:
    from megarl.models.hf.export import HFExporter
    from megarl.models.hf.gather import Gather

logger = logging.getLogger(__name__)


class WeightSender:
    """Publishes the trainer's weights to all engines. Create it, and call `connect` and `publish`, on every rank."""

    def __init__(
        self,
        settings: SyncSettings,
        exporter: HFExporter,
        *,
        host: str | None = None,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
        frozen: Sequence[str] = (),
    ) -> None:
        """`host`: the address at which rank 0 serves the store; None: `reachable_address`.

        `aside`: entered on every rank while engines are started that need the GPUs of the ranks. `frozen`: names of
        tensors that never change. Each group gets them once; engines that reload or sleep get them each time.
        """
        self.settings = settings
        self._exporter = exporter
        self._host, self._aside, self._frozen = host, aside, frozen
        distributed = torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._world = torch.distributed.get_world_size() if distributed else 1
        self.plan: BucketPlan  # `connect` makes it, and opens the store
        self.store: SyncStore
        self._engines: EngineCalls | None = None  # on the leader
        self._group: Group | None = None
        self._generation = -1  # that of the last group that was formed, or was to be
        self._packer: BucketPacker | None = None
        self._order: Order = ()
        self._gathers: Sequence[Gather | None] = ()
        self._sync = 0

    def connect(self, pool: EngineHandles | None) -> None:
        """Make the plan and form the group with all engine workers. Collective. Rank 0 passes the pool, others None.

        Raises:
            ValueError: the pool is missing on rank 0, or passed on another rank.
            WeightSyncError: an engine worker did not join; the error names it.
        """
        if (pool is None) == (self._rank == 0):
            raise ValueError("WeightSender.connect needs the pool on trainer rank 0 and None on all other ranks")
        self.plan = bucket_plan(self._exporter.manifest(), self.settings.bucket_bytes)
        settings = self.settings
        host = (self._host or reachable_address()) if self._rank == 0 else None
        self.store = open_trainer_store(settings, host, self._world)
        if pool is not None:
            calls = self.store.connection()
            self._engines = EngineCalls(
                pool, calls, self._world, settings.rpc_s, settings.recompute_kv, asleep=settings.asleep
            )
        self._form()

    def publish(self, version: int) -> SyncReport:
        """Make every replica serve `version`, with weights bit-identical to those that the exporter yields. Collective.

        If replicas have joined or left the pool since the last sync, the group is formed again first.

        If engines make a sync fail, it is repeated at most `settings.restarts` times. Failed engines are replaced.
        Those that had begun to load discard it and load everything again. They do not wait for the new engines, which
        join a later sync.

        Raises:
            WeightSyncError: on every rank, with the members that failed. No replica then serves the version.
        """
        restarted: tuple[str, ...] = ()
        if self._group is None or self._group.members.replicas != self._names():
            self.close()
            restarted = self._form()
        begun = time.monotonic()
        for attempt in range(self.settings.restarts + 1):
            outcome = self._attempt(version, may_repeat=attempt < self.settings.restarts)
            if outcome["status"] == "published":
                report = SyncReport(**{**outcome["report"], "restarted": restarted})
                self._record(report, begun)
                if (
                    self._frozen
                    and self.plan.layer_span is None
                    and not self.plan.left_out
                    and not self.settings.asleep
                ):
                    self._lay_out_buckets(None, self._frozen)
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

    def _from_leader(self, key: str, wait_s: float, what: str, make: Callable[[EngineCalls], JsonValue]) -> JsonValue:
        """Have rank 0 call `make`, and return its result on every rank, under `key` of this generation in the store.

        Raises WeightSyncError on every rank if `make` raises, and PeerTimeout on other ranks than 0 after `wait_s`.
        `what`: what rank 0 does, for the error.
        """
        key = f"g{self._generation}/{key}"
        if self._engines is None:
            answer = self.store.wait(key, wait_s, f"trainer rank 0 to {what}")
            if "value" in answer:
                return answer["value"]
            message, failed_members, needs_restart = answer["error"]
            raise WeightSyncError(message, failed_members=failed_members, needs_restart=needs_restart)

        def sent(error: WeightSyncError) -> WeightSyncError:
            self.store.put(key, {"error": [str(error), error.failed_members, error.needs_restart]})
            return error

        try:
            value = make(self._engines)
        except WeightSyncError as error:
            sent(error)
            raise
        except Exception as error:
            raise sent(WeightSyncError(f"trainer rank 0 could not {what}: {error}")) from error
        if self._world > 1:
            self.store.put(key, {"value": value})
        return value

    @property
    def _controller_s(self) -> float:
        """Seconds in which rank 0 reaches the controller, which may first have to be found dead and restarted."""
        return 8 * self.settings.rpc_s + self.settings.restart_s

    def _names(self) -> tuple[str, ...]:
        """Return the names of the replicas that the pool has now. Raises WeightSyncError if it does not answer."""
        what = "ask the pool for its replicas"
        names = self._from_leader(
            f"s{self._sync}/names", self._controller_s, what, lambda engines: list(engines.handles.names())
        )
        if self._world > 1 and self._rank == 0:  # every rank has read that one
            self.store.drop(f"g{self._generation}/s{self._sync - 3}/names")
        return tuple(names)

    def _form(self, replace: Sequence[str] = (), *, later: bool = False) -> tuple[str, ...]:
        """Form the next generation's group and enter it; if replicas fail to join, restart them and form it once more.

        Replaces the replicas `replace` first, or `later` without waiting for the new ones. Returns the replicas that
        were restarted because they did not join. Raises WeightSyncError on every rank if the group is not formed.
        """
        restarted: tuple[str, ...] = ()
        if self.plan.left_out:  # new members have none of it
            self.plan = bucket_plan(self.plan.specs, self.plan.bucket_bytes, self.plan.layer_span)
        try:
            in_place = self._form_once(replace, later)
        except WeightSyncError as error:
            if not error.needs_restart or set(replace) & set(error.needs_restart) or self.settings.restarts == 0:
                raise
            restarted = error.needs_restart
            logger.warning("restarting %s: %s", ", ".join(restarted), error)
            in_place = self._form_once(restarted)
        self._lay_out_buckets(None if in_place else RELOAD_LAYER_SPAN)
        return restarted

    def _form_once(self, replace: Sequence[str], later: bool = False) -> bool:
        """Form the next generation's group; return whether all engine workers load in place."""
        self._generation += 1
        settings = self.settings

        def find_members(engines: EngineCalls) -> str:
            if replace:
                # An engine that starts alongside training would find no memory on a shared GPU.
                alongside = later and not settings.asleep
                (engines.handles.replace_later if alongside else engines.handles.restart)(replace, settings.restart_s)
            senders = range(self._world) if settings.relays else self.plan.owners
            return engines.members(self._generation, senders, settings.backend, settings.sync_s).to_json()

        wait_s = self._controller_s + (settings.restart_s if replace else 0.0)
        with self._aside() if replace else nullcontext():
            found = self._from_leader("members", wait_s, "reach all engine replicas", find_members)
        members = GroupMembers.from_json(found)
        rank = members.senders.index(self._rank) if self._rank in members.senders else None
        group = Group(self.store, members, rank, f"trainer rank {self._rank}")
        in_place, error = False, None
        try:
            in_place = self._join(group)
        except Exception as failure:
            error = failure

        def end(engines: EngineCalls) -> bool:
            end_forming(self.store, self._generation, None if error is None else str(error))
            if error is not None:
                raise error
            return in_place

        try:
            in_place = self._from_leader("formed", 2 * settings.rpc_s, "form the weight-sync group", end)
            if error is not None:
                raise error
        except BaseException:
            group.abort()
            raise
        self._group = group
        return bool(in_place)

    def _join(self, group: Group) -> bool:
        """Join the group if this rank sends. On the leader, also make the engines join, and wait for all members.

        Returns whether all engine workers load in place, which only the leader knows.
        """
        members, timeout_s = group.members, self.settings.rpc_s
        leading: list[Future[Any]] = []
        if self._engines is not None:
            leading = [
                call_in_thread(await_members, self.store.connection(), members, timeout_s),
                call_in_thread(self._engines.connect, members, self.plan, timeout_s),
            ]
        error: Exception | None = None
        try:
            self._exporter.connect(0.9 * timeout_s)  # ends before the leader's wait for all members
            if group.rank is not None:
                group.join(timeout_s)
        except Exception as failure:
            error = failure
            if not isinstance(failure, SyncAborted):
                end_forming(self.store, members.generation, f"{group.name}: {failure}")
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

    def _lay_out_buckets(self, layer_span: int | None, left_out: Sequence[str] = ()) -> None:
        """Make the plan, the order of operations, this rank's buffers and its part of every bucket's gather.

        `layer_span`: the most layers whose tensors may be incomplete at once, None for any number. `left_out`: names of
        tensors that all members of the group have.
        """
        if layer_span != self.plan.layer_span or left_out:
            self.plan = bucket_plan(self.plan.specs, self.settings.bucket_bytes, layer_span, left_out)
        settings = self.settings
        device = torch.device(BACKENDS[settings.backend].device)
        self._packer, self._gathers = None, ()  # the plan has memory for one set of buffers
        packer = BucketPacker(self.plan, self._rank, device)
        self._order = schedule(self.plan)
        # The exporter needs the order of the gathers: in each second one a rank sends from the same memory.
        requests = packer.requests()
        gathered = [operation.bucket.index for operation in self._order if operation.kind == "gather"]
        gathers = self._exporter.gathers([requests[index] for index in gathered], device)
        by_bucket = dict(zip(gathered, gathers, strict=True))
        self._gathers = [by_bucket[bucket.index] for bucket in self.plan.buckets]
        takes_part = settings.relays or self._rank in self.plan.owners
        self._packer = packer if takes_part else None

    def _attempt(self, version: int, may_repeat: bool) -> dict[str, Any]:
        """Make one attempt to publish. Return its outcome, which the leader determines for all ranks."""
        assert self._group is not None  # connected
        sync, self._sync = self._sync, self._sync + 1
        group, started, limit_s = self._group, time.perf_counter(), self.settings.sync_s
        group.begin(sync, len(self.plan.buckets), limit_s)
        own = SyncAttempt(group, self._order, self._gathers, self._packer, self._rank, version)
        engines = None
        if self._engines is not None:
            publish = self._engines.publish
            engines = call_in_thread(publish, group, self.plan, sync, version, limit_s, own.staged)
        error: Exception | None = None
        try:
            own.run()
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
                own.finish_gathers(self.settings.rpc_s)
        except WeightSyncError as failure:
            outcome = {**outcome, "status": "failed", "message": f"{outcome['message']}; then {failure}"}
        self._leave_group()
        if error is not None and not isinstance(error, WeightSyncError):
            raise error
        return outcome

    def _await_outcome(self, version: int) -> dict[str, Any]:
        """Wait until the leader has ended the sync, and return its outcome."""
        assert self._group is not None
        group, what = self._group, f"trainer rank 0 to end the sync of version {version}"
        wait_s = self.settings.sync_s + 3 * self.settings.rpc_s
        end = group.wait_end(wait_s)
        if end is None:
            raise PeerTimeout(f"trainer rank {self._rank} waited {wait_s:.0f} s for {what}")
        if "abort" in end:  # the leader finds the cause, and releases the engines
            try:
                return dict(self.store.wait(group.key("outcome"), 3 * self.settings.rpc_s, what))
            except DistNetworkError as error:
                raise WeightSyncError(end["abort"], version=version, failed_members=["trainer rank 0"]) from error
        return dict(end)

    def _end(
        self, engines: Future[SyncReport], error: Exception | None, may_repeat: bool, seconds: float
    ) -> dict[str, Any]:
        """On the leader, wait for the engines and end the sync for all members. Return the outcome."""
        assert self._group is not None and self._engines is not None
        stage = self._group.stage
        outcome = self._outcome(engines, error, may_repeat, seconds)
        if outcome["status"] == "published":
            end = self.store.put_once(end_key(stage), outcome)
        else:
            self._group.post_abort(outcome["message"])
            end = {"abort": outcome["message"]}
        if "abort" in end:
            self.store.put(self._group.key("outcome"), outcome)
        self._engines.forget(self._group, stage)
        # Every member has seen the end of the sync before the last one.
        self.store.drop(end_key(f"g{self._group.members.generation}/s{self._sync - 3}"))
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
