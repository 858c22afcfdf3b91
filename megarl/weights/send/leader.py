"""The leader's part of a weight sync: calls to the replicas, and the checks before a version is published.

Order of one sync, over all replicas: wait until the leader has staged its first buckets, while they generate -> pause
-> start -> update (all buckets) -> compare every worker's digests with the senders' -> finish, which sets the version
-> resume. After a failure between start and resume no replica is resumed: if the sync is repeated, those that failed
are replaced, and the others give up what they have loaded, stay paused and load all of it again; if not, all must be
replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from megarl.common.errors import DigestMismatch, PeerTimeout, SyncAborted, WeightSyncError
from megarl.common.process.threads import call_in_thread
from megarl.telemetry.trace import events
from megarl.weights.group.protocols import ABANDON, EngineHandles, ReplicaHandle
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import POLL_S, Group, GroupMembers, end_forming, forming_failed
from megarl.weights.plan.buckets import BucketPlan, pack_manifest
from megarl.weights.plan.settings import SyncReport
from megarl.weights.send.parallel_calls import EXTRA_WAIT_S, CallsFailed, CutShort, Release, Returned, brief, call_all
from megarl.weights.send.sync_failure import STAGE, FailureReader

logger = logging.getLogger(__name__)


class LoadingWays:
    """The way in which each worker has loaded last (in place, or why not), logged when it changes."""

    def __init__(self) -> None:
        self._ways: dict[str, str] = {}

    def note(self, version: int, reports: Sequence[dict[str, Any]]) -> None:
        """Log in which ways the engines load, if that of a worker differs from its last one.

        `reports`: those of all workers on the sync of `version`.
        """
        before, self._ways = self._ways, {each["member"]: each["loaded"] for each in reports}
        if self._ways != before:
            logger.info("weights of version %d: %s", version, _by_way(self._ways))


def _by_way(ways: Mapping[str, str]) -> str:
    """Return which engine workers load in which way as text, `ways` by worker."""
    workers: dict[str, list[str]] = {}
    for member, way in ways.items():
        workers.setdefault(way, []).append(member)
    if len(workers) == 1:
        return f"{next(iter(workers))} (all {len(ways)} engine workers)"
    return "; ".join(f"{way} ({', '.join(names)})" for way, names in workers.items())


# The part of a sync that each call to the replicas belongs to.
_PHASES = {
    "pause": "pause",
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
    "resume": "resume",
}


class _SyncCalls:
    """The calls of one sync to all replicas. `phase`: that of the last one; `seconds`: what each took, by method."""

    def __init__(self, replicas: Sequence[ReplicaHandle], group: Group, version: int, rpc_s: float) -> None:
        """`rpc_s`: the bound of a call that has no other one."""
        self._replicas, self._group, self._version = replicas, group, version
        self._rpc_s = rpc_s
        self._release = Release(group.aborted, group.post_abort)
        self.phase = STAGE
        self.seconds: dict[str, float] = {}

    def make(self, method: str, *args: object, limit: float | None = None) -> list[Returned]:
        """Call `method` with `args` on every replica.

        Raises SyncAborted, and calls nothing, if another member has failed; CallsFailed as `call_all` does.
        """
        if self._group.aborted() and method != "resume":  # another member failed: go no further
            raise SyncAborted(self._group.abort_reason or "")
        self.phase = _PHASES[method]
        begun = time.monotonic()
        arguments = [args] * len(self._replicas)
        timeout_s = limit or self._rpc_s
        returned = call_all(self._replicas, method, arguments, timeout_s=timeout_s, release=self._release)
        ended = time.monotonic()
        self.seconds[method] = ended - begun
        events.record(f"sync_{self.phase}", begun, ended, version=self._version)
        return returned


class EngineCalls:
    """Calls the replicas, on the leader."""

    def __init__(
        self, handles: EngineHandles, store: SyncStore, trainer_ranks: int, rpc_s: float, recompute_kv: bool
    ) -> None:
        """`store`: a connection of its own; `trainer_ranks`: how many there are."""
        self.handles = handles
        self._store = store
        self._failures = FailureReader(store, trainer_ranks)
        self._rpc_s = rpc_s
        self._recompute_kv = recompute_kv
        # The replicas of this generation: the pool may drop a dead replica, but the error must still name it.
        self._replicas: list[ReplicaHandle] = []
        self._phase = STAGE  # in which the last sync has ended
        self._ways = LoadingWays()

    def members(self, generation: int, senders: Sequence[int], backend: str, sync_s: float) -> GroupMembers:
        """Return the members of a new generation. Asks every replica for its number of workers."""
        replicas = self._replicas = list(self.handles.replicas())
        try:
            sizes = call_all(replicas, "world_size", timeout_s=self._rpc_s)
        except CallsFailed as error:
            # None waits for another one, so that each has failed by itself, but those that had no time to answer.
            failed = {i: each for i, each in error.failures.items() if not isinstance(each, CutShort)}
            raise self._not_reached(error, replicas, failed) from error
        names = tuple(replica.name for replica in replicas)
        workers = tuple(cast("int", each.value) for each in sizes)
        return GroupMembers(generation, tuple(senders), names, workers, backend, sync_s)

    def connect(self, members: GroupMembers, plan: BucketPlan, timeout_s: float) -> None:
        """Make every engine worker join the group, while the senders join it too. Raises WeightSyncError."""
        replicas, store, generation = self._replicas, self._store, members.generation
        common = {
            "host": store.host,
            "port": store.port,
            "key": store.key.hex(),
            "members": members.to_json(),
            "manifest": pack_manifest(plan),
            "plan_hash": plan.hash,
            # The leader's wait for all members must end first: its error names those that are missing.
            "timeout_s": timeout_s + EXTRA_WAIT_S,
        }
        arguments = [({**common, "replica": index},) for index in range(len(replicas))]
        release = Release(
            lambda: forming_failed(store, generation), lambda reason: end_forming(store, generation, reason)
        )
        try:
            limit = timeout_s + 2 * EXTRA_WAIT_S
            call_all(replicas, "init_weight_transfer", arguments, timeout_s=limit, release=release)
        except CallsFailed as error:
            raise self._not_reached(error, replicas, error.first) from error

    def publish(
        self,
        group: Group,
        plan: BucketPlan,
        sync: int,
        version: int,
        timeout_s: float,
        staged: threading.Event,
    ) -> SyncReport:
        """Take all replicas through one sync, in which `group` has begun. Does not end the sync if it succeeds.

        `staged`: set when the leader has staged its first buckets; until then the replicas generate.

        Raises:
            WeightSyncError: with the failed members, and the replicas that must be replaced even if it is repeated.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        calls = _SyncCalls(self._replicas, group, version, self._rpc_s)
        info = {"sync": sync, "version": version, "layer_span": plan.layer_span, "plan_hash": plan.hash}
        try:
            _await_staged(staged, group, timeout_s)
            pause_begun = time.monotonic()
            calls.seconds[STAGE] = pause_begun - started
            events.record("sync_stage", started, pause_begun, version=version)
            calls.make("pause", self._recompute_kv)
            calls.make("start_weight_update")
            remaining = max(0.1, deadline - time.monotonic())
            calls.make("update_weights", {**info, "timeout_s": remaining}, limit=remaining + EXTRA_WAIT_S)
            reports = self._await_reports(group, plan, deadline)
            calls.make("finish_weight_update", str(version))
            resumed = calls.make("resume")
        except (CallsFailed, WeightSyncError) as error:
            raise self._failures.explain(error, group, self._replicas, version, calls.phase) from error
        finally:
            self._phase = calls.phase
        total = time.monotonic() - started
        pause_s = max(each.at for each in resumed) - pause_begun
        digest_s = _digest_seconds(group.members, reports)
        self._ways.note(version, reports[len(group.members.senders) :])
        return SyncReport(version, total, plan.total_bytes, len(plan.buckets), digest_s, pause_s, calls.seconds)

    def _await_reports(self, group: Group, plan: BucketPlan, deadline: float) -> list[dict[str, Any]]:
        """Return every member's report, after comparing all digests with the senders'. Raises DigestMismatch."""
        keys = [group.key("report", rank) for rank in range(len(group.names))]
        reports = self._store.block_all(keys, max(1.0, deadline - time.monotonic()))
        if reports is None:
            raise PeerTimeout(f"{group.name} waited until the deadline for the reports of all members")
        for report in reports:
            if report["failure"] is not None:
                raise WeightSyncError(f"{report['member']}: {report['failure']}")
        sent: dict[int, int] = {}
        for report in reports[: len(group.members.senders)]:
            sent |= {int(index): value for index, value in (report.get("digests") or {}).items()}
        expected = [sent.get(bucket.index) for bucket in plan.buckets]
        for report in reports[len(group.members.senders) :]:
            received = report.get("digests") or []
            if received != expected:
                wrong = [i + 1 for i, pair in enumerate(zip(expected, received, strict=False)) if pair[0] != pair[1]]
                raise DigestMismatch(
                    f"{report['member']} has other digests than the senders: {len(received)} of {len(expected)} "
                    f"buckets received, differing: {wrong[:10]}",
                    failed_members=[report["member"]],
                )
        return list(reports)

    def forget(self, group: Group, stage: str) -> None:
        """Delete what a sync has left in the store: all members' reports of this stage."""
        for rank in range(len(group.names)):
            self._store.drop(f"{stage}/report/{rank}")

    def after_failure(self, failure: WeightSyncError, *, repeats: bool) -> list[str]:
        """Prepare the replicas for what follows a failed sync; return the names of those that must be replaced.

        Those that have not begun to load resume, or are left alone, with the version they have. If the sync `repeats`,
        the others give up what they have loaded, and stay paused; one that cannot, and all that must be replaced,
        refuse requests from now on. All at the same time: the trainer ranks wait for the outcome, and a replica that
        hangs takes EXTRA_WAIT_S to refuse requests, or `rpc_s` otherwise.
        """
        replicas = self._replicas if self._phase != STAGE else []
        calls = [call_in_thread(self._release_replica, replica, failure, repeats) for replica in replicas]
        return [replica.name for replica, call in zip(replicas, calls, strict=True) if call.result()]

    @property
    def loading(self) -> bool:
        """Whether the replicas may have begun to load in the last sync."""
        return self._phase not in (STAGE, "pause")

    def _release_replica(self, replica: ReplicaHandle, failure: WeightSyncError, repeats: bool) -> bool:
        """Do what `after_failure` says with one replica; tell whether it must be replaced."""
        reason = f"was left in the middle of a failed weight sync: {failure}"
        replaced = replica.name in failure.needs_restart or (self.loading and not repeats)
        if self.loading and not replaced:
            try:
                replica.call("abandon_weight_update", ABANDON, timeout_s=self._rpc_s)
                return False
            except Exception as error:
                replaced, reason = True, f"could not give up a failed weight sync: {brief(error)}"
                logger.warning("engine %s %s", replica.name, reason)
        try:
            if replaced:
                replica.call("fail", reason, timeout_s=EXTRA_WAIT_S)
            else:
                replica.call("resume", timeout_s=self._rpc_s)
        except Exception as error:  # a dead replica cannot answer, and is reported already
            logger.warning("engine %s after a failed sync: %s", replica.name, brief(error))
        return replaced

    def _not_reached(
        self, error: CallsFailed, replicas: list[ReplicaHandle], failures: Mapping[int, BaseException]
    ) -> WeightSyncError:
        """Return the error of a group that could not be formed. `failures`: its causes, by index of the replica."""
        failed = [replicas[index].name for index in failures]
        names = [f"engine {name}" for name in failed]
        reasons = [f"engine {replicas[i].name}: {brief(each)}" for i, each in failures.items()]
        return WeightSyncError(
            f"could not connect the weight-sync group, {error.method} failed: {'; '.join(reasons)}",
            failed_members=names,
            needs_restart=failed,
        )


def _await_staged(staged: threading.Event, group: Group, timeout_s: float) -> None:
    """Wait until the leader has staged its first buckets, for `timeout_s` seconds and EXTRA_WAIT_S.

    The members' own deadlines come first: their errors name the rank that is missing.

    Raises:
        SyncAborted: a member has failed.
        PeerTimeout: the leader's own thread does not come to a wait that could end.
    """
    wait_s = timeout_s + EXTRA_WAIT_S
    deadline = time.monotonic() + wait_s
    while not staged.wait(POLL_S):
        if group.aborted():
            raise SyncAborted(group.abort_reason or "")
        if time.monotonic() > deadline:
            raise PeerTimeout(f"{group.name} waited {wait_s:.1f} s for its own first buckets to be gathered")


def _digest_seconds(members: GroupMembers, reports: list[dict[str, Any]]) -> float:
    """Return the digest time of the slowest sender plus that of the slowest receiver, in seconds."""
    seconds = [report.get("seconds", {}).get("digest", 0.0) for report in reports]
    count = len(members.senders)
    return max(seconds[:count], default=0.0) + max(seconds[count:], default=0.0)
