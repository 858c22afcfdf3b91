"""The leader's part of a weight sync: calls to the replicas, and the checks before a version is published.

Order of one sync, over all replicas: wait until the leader has staged its first buckets, while they generate -> pause
-> start -> update (all buckets) -> compare every worker's digests with the senders' -> finish, which sets the version
-> resume. Engines that share the trainer's GPUs sleep. Instead of a pause the memory of their weights wakes, and they
resume when the trainer has left (`sleep.py`).

After a failure between start and resume no replica is resumed. If the sync is repeated, failed replicas are replaced,
and the others discard what they have loaded, stay paused and load everything again. If not, all must be replaced.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from megarl.common.errors import DigestMismatch, PeerTimeout, SyncAborted, WeightSyncError
from megarl.common.process.threads import call_in_thread
from megarl.telemetry.trace import events
from megarl.weights.group.protocols import ABANDON, EngineHandles, ReplicaHandle
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import POLL_S, Group, GroupMembers, end_forming, forming_failed
from megarl.weights.plan.buckets import BucketPlan, pack_manifest
from megarl.weights.plan.settings import SyncReport
from megarl.weights.send.failure import BEFORE_LOADING, STAGE, CallsFailed, CutShort, brief, explain

logger = logging.getLogger(__name__)

REPORT_S = 1.0  # after which a wait for reports looks whether a member has failed
EXTRA_WAIT_S = 3.0  # after the first failure, in which the calls to the other replicas can end


class EngineCalls:
    """Calls the replicas, on the leader."""

    def __init__(
        self,
        handles: EngineHandles,
        store: SyncStore,
        trainer_ranks: int,
        rpc_s: float,
        recompute_kv: bool,
        *,
        asleep: bool = False,
    ) -> None:
        """`store`: a connection of its own; `trainer_ranks`: how many there are.

        `asleep`: the engines sleep when a sync begins, and stay so until `sleep.wake_caches`.
        """
        self.handles = handles
        self._store = store
        self._trainer_ranks = trainer_ranks
        self._rpc_s = rpc_s
        self._recompute_kv, self._asleep = recompute_kv, asleep
        # The replicas of this generation: the pool may drop a dead replica, but the error must still name it.
        self._replicas: list[ReplicaHandle] = []
        self._phase = STAGE  # of the last sync: what was called last
        self._ways: dict[str, str] = {}  # by worker: how it has loaded last (in place, or why not)

    def members(self, generation: int, senders: Sequence[int], backend: str, sync_s: float) -> GroupMembers:
        """Return the members of a new generation. Asks every replica for its number of workers."""
        replicas = self._replicas = list(self.handles.replicas())
        try:
            workers = call_all(replicas, "world_size", timeout_s=self._rpc_s)
        except CallsFailed as error:
            # None waits for another one, so each failed on its own, except those without time to answer.
            failed = {i: each for i, each in error.failures.items() if not isinstance(each, CutShort)}
            raise self._not_reached(error, failed) from error
        names = tuple(replica.name for replica in replicas)
        return GroupMembers(generation, tuple(senders), names, tuple(workers), backend, sync_s)

    def connect(self, members: GroupMembers, plan: BucketPlan, timeout_s: float) -> None:
        """Make every engine worker join the group, while the senders join it too. Raises WeightSyncError."""
        store, generation = self._store, members.generation
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
        try:
            call_all(
                self._replicas,
                "init_weight_transfer",
                [({**common, "replica": index},) for index in range(len(self._replicas))],
                timeout_s=timeout_s + 2 * EXTRA_WAIT_S,
                aborted=lambda: forming_failed(store, generation),
                abort=lambda reason: end_forming(store, generation, reason),
            )
        except CallsFailed as error:
            raise self._not_reached(error, error.first) from error

    def publish(
        self, group: Group, plan: BucketPlan, sync: int, version: int, timeout_s: float, staged: threading.Event
    ) -> SyncReport:
        """Take all replicas through one sync, in which `group` has begun. Does not end the sync if it succeeds.

        `staged`: set when the leader has staged its first buckets; until then the replicas generate.

        Raises:
            WeightSyncError: with the failed members, and the replicas that must be replaced even if it is repeated.
        """
        self._phase = STAGE
        seconds: dict[str, float] = {}
        started = time.monotonic()
        deadline = started + timeout_s

        def call(method: str, *args: object, limit_s: float = self._rpc_s) -> None:
            """Call `method` on every replica, unless another member has failed. The phase is its first word."""
            if group.aborted() and method != "resume":
                raise SyncAborted(group.abort_reason or "")
            self._phase = method.partition("_")[0]
            begun = time.monotonic()
            arguments = [args] * len(self._replicas)
            call_all(
                self._replicas, method, arguments, timeout_s=limit_s, aborted=group.aborted, abort=group.post_abort
            )
            seconds[method] = time.monotonic() - begun
            events.record(f"sync_{self._phase}", begun, time.monotonic(), version=version)

        try:
            _await_staged(staged, group, timeout_s)
            paused_at = time.monotonic()
            seconds[STAGE] = paused_at - started
            events.record("sync_stage", started, paused_at, version=version)
            if self._asleep:
                call("wake", "weights")
            else:
                call("pause", self._recompute_kv)
            call("start_weight_update")
            left = max(0.1, deadline - time.monotonic())
            update: dict[str, Any] = {
                "sync": sync,
                "version": version,
                "layer_span": plan.layer_span,
                "plan_hash": plan.hash,
            }
            update |= {"slept": True} if self._asleep else {}
            update |= {"left_out": sorted(plan.left_out)} if plan.left_out else {}
            call("update_weights", {**update, "timeout_s": left}, limit_s=left + EXTRA_WAIT_S)
            reports = self._await_reports(group, plan, deadline)
            call("finish_weight_update", str(version))
            if not self._asleep:
                call("resume")
        except (CallsFailed, WeightSyncError) as error:
            ranks = self._trainer_ranks
            raise explain(error, group, self._store, ranks, self._replicas, version, self._phase) from error
        ended = time.monotonic()
        senders = len(group.members.senders)
        self._log_ways(version, reports[senders:])
        # Of the slowest sender and of the slowest receiver.
        digest_s = sum(
            max((report.get("digest_s", 0.0) for report in of), default=0.0)
            for of in (reports[:senders], reports[senders:])
        )
        buckets = len(plan.buckets)
        return SyncReport(version, ended - started, plan.total_bytes, buckets, digest_s, ended - paused_at, seconds)

    def _await_reports(self, group: Group, plan: BucketPlan, deadline: float) -> list[dict[str, Any]]:
        """Return every member's report, after comparing all digests with the senders'.

        Raises DigestMismatch, and SyncAborted if a member has failed: that one writes no report.
        """
        keys = [group.key("report", rank) for rank in range(len(group.names))]
        while (reports := self._store.block_all(keys, REPORT_S)) is None:
            if group.aborted():
                raise SyncAborted(group.abort_reason or "")
            if time.monotonic() > deadline:
                raise PeerTimeout(f"{group.name} waited until the deadline for the reports of all members")
        senders = len(group.members.senders)
        sent: dict[int, int] = {}
        for report in reports[:senders]:
            sent |= {int(index): value for index, value in (report.get("digests") or {}).items()}
        expected = [sent.get(bucket.index) for bucket in plan.buckets]
        for report in reports[senders:]:
            received = report.get("digests") or []
            if received != expected:
                wrong = [i + 1 for i, pair in enumerate(zip(expected, received, strict=False)) if pair[0] != pair[1]]
                raise DigestMismatch(
                    f"{report['member']} has other digests than the senders: {len(received)} of {len(expected)} "
                    f"buckets received, differing: {wrong[:10]}",
                    failed_members=[report["member"]],
                )
        return list(reports)

    def _log_ways(self, version: int, reports: Sequence[dict[str, Any]]) -> None:
        """Log in which ways the engines load, if that of a worker differs from its last one."""
        before, self._ways = self._ways, {report["member"]: report["loaded"] for report in reports}
        if self._ways == before:
            return
        workers: dict[str, list[str]] = {}
        for member, way in self._ways.items():
            workers.setdefault(way, []).append(member)
        everyone = f"all {len(reports)} engine workers"
        ways = [f"{way} ({', '.join(names) if len(workers) > 1 else everyone})" for way, names in workers.items()]
        logger.info("weights of version %d: %s", version, "; ".join(ways))

    def forget(self, group: Group, stage: str) -> None:
        """Delete what a sync has left in the store: all members' reports of this stage."""
        for rank in range(len(group.names)):
            self._store.drop(f"{stage}/report/{rank}")

    def after_failure(self, failure: WeightSyncError, *, repeats: bool) -> list[str]:
        """Prepare the replicas for what follows a failed sync; return the names of those that must be replaced.

        Those that have not begun to load resume, or are left alone, with the version they have. If the sync `repeats`,
        the others discard what they have loaded, and stay paused. One that cannot, and all that must be replaced,
        refuse requests from now on. All calls run at the same time, because the trainer ranks wait for the outcome. A
        hanging replica takes up to EXTRA_WAIT_S to refuse requests, or `rpc_s` otherwise.
        """
        replicas = self._replicas if self._phase != STAGE else []
        calls = [call_in_thread(self._release, replica, failure, repeats) for replica in replicas]
        return [replica.name for replica, call in zip(replicas, calls, strict=True) if call.result()]

    @property
    def loading(self) -> bool:
        """Whether the replicas may have begun to load in the last sync."""
        return self._phase not in BEFORE_LOADING

    def _release(self, replica: ReplicaHandle, failure: WeightSyncError, repeats: bool) -> bool:
        """Do what `after_failure` says with one replica; return whether it must be replaced."""
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

    def _not_reached(self, error: CallsFailed, failures: Mapping[int, BaseException]) -> WeightSyncError:
        """Return the error of a group that could not be formed. `failures`: its causes, by index of the replica."""
        failed = [self._replicas[index].name for index in failures]
        reasons = [f"engine {self._replicas[i].name}: {brief(each)}" for i, each in failures.items()]
        return WeightSyncError(
            f"could not connect the weight-sync group, {error.method} failed: {'; '.join(reasons)}",
            failed_members=[f"engine {name}" for name in failed],
            needs_restart=failed,
        )


def call_all(
    replicas: Sequence[ReplicaHandle],
    method: str,
    arguments: Sequence[tuple[object, ...]] | None = None,
    *,
    timeout_s: float,
    aborted: Callable[[], bool] = lambda: False,
    abort: Callable[[str], None] = lambda reason: None,
    extra_s: float = EXTRA_WAIT_S,
) -> list[Any]:
    """Call `method` on all replicas, each in a thread, and return the results in their order.

    `arguments`: one tuple per replica; None: none. Other calls may wait for a failed member. So after the first
    failure, of a call or (`aborted`) of another member, they have `extra_s` to end. `abort` releases all members.

    Raises:
        CallsFailed: with all failures, and those that came first.
    """
    calls = [
        call_in_thread(
            lambda replica, args: replica.call(method, *args, timeout_s=timeout_s), *each, name=f"{method}-{index}"
        )
        for index, each in enumerate(zip(replicas, arguments or [()] * len(replicas), strict=True))
    ]
    first: dict[int, BaseException] = {}
    cut_short = False
    deadline = time.monotonic() + timeout_s + EXTRA_WAIT_S
    pending = set(calls)
    while pending and time.monotonic() < deadline:
        _, pending = wait(pending, POLL_S, FIRST_COMPLETED)
        failures = {i: error for i, call in enumerate(calls) if call.done() and (error := call.exception()) is not None}
        if not cut_short and (failures or aborted()):
            cut_short, first = True, failures
            deadline = min(deadline, time.monotonic() + extra_s)
            for index, failure in list(failures.items())[:1]:
                abort(f"engine {replicas[index].name} failed in {method}: {brief(failure)}")
    late = (
        CutShort(f"no answer to {method} within {extra_s:.1f} s after the failure of another member")
        if cut_short
        else TimeoutError(f"no answer to {method} within {timeout_s:.1f} s")
    )
    ends = [call.exception() if call.done() else late for call in calls]
    failures = {index: error for index, error in enumerate(ends) if error is not None}
    results = {index: call.result() for index, call in enumerate(calls) if index not in failures}
    if failures:
        raise CallsFailed(method, failures, first, results)
    return list(results.values())


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
