"""The leader's part of a weight sync: calls to the replicas, checks before a version is published, causes of failures.

Order of one sync, over all replicas: pause -> start -> update (all buckets) -> compare every worker's digests with the
senders' -> finish, which sets the version -> resume. After a failure between start and finish the replicas are never
resumed, and must be restarted.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megarl.common.errors import DigestMismatch, WeightSyncError
from megarl.weights.buckets import BucketPlan, pack_manifest
from megarl.weights.failure_cause import FailedCall, FailureCause, find_cause
from megarl.weights.handles import EngineHandles, ReplicaHandle
from megarl.weights.transport import POLL_S, Group, GroupMembers, SyncStore, names_of

logger = logging.getLogger(__name__)

EXTRA_WAIT_S = 3.0  # after the first failure, in which the other members can report what they observed


@dataclass(frozen=True)
class SyncReport:
    """The facts of one published version, equal on every trainer rank; times in seconds, sizes in bytes."""

    version: int
    seconds: float
    bytes: int
    buckets: int
    digest_seconds: float  # of the slowest sender plus those of the slowest receiver, which partly overlap
    phases: dict[str, float] = field(default_factory=dict)  # seconds by the called method
    restarted: tuple[str, ...] = ()  # replicas that were restarted before the sync succeeded


_Answer: TypeAlias = tuple[int, bool, Any]  # a replica's index, whether its call returned, the result or exception


class CallsFailed(Exception):  # noqa: N818
    """Calls to some replicas raised. `failures`: the exceptions by index of the replica; `first`: the earliest ones."""

    def __init__(self, method: str, failures: dict[int, BaseException], first: dict[int, BaseException]) -> None:
        super().__init__(method)
        self.method = method
        self.failures = failures
        self.first = first or failures


class EngineCalls:
    """Calls the replicas, on the leader."""

    def __init__(self, handles: EngineHandles, rpc_s: float, recompute_kv: bool) -> None:
        self.handles = handles
        self._rpc_s = rpc_s
        self._recompute_kv = recompute_kv
        # The replicas of this generation: the pool may drop a dead replica, but the error must still name it.
        self._replicas: list[ReplicaHandle] = []

    def members(self, generation: int, senders: Sequence[int], backend: str) -> GroupMembers:
        """Return the members of a new generation. Asks every replica for its number of workers."""
        replicas = self._replicas = list(self.handles.replicas())
        try:
            sizes = self._all(replicas, "world_size", timeout_s=self._rpc_s)
        except CallsFailed as error:
            raise self._not_reached(error, replicas) from error
        names = tuple(replica.name for replica in replicas)
        return GroupMembers(generation, tuple(senders), names, tuple(int(n) for n in sizes), backend)

    def connect(self, store: SyncStore, members: GroupMembers, plan: BucketPlan, timeout_s: float) -> None:
        """Make every engine worker join the group, while the senders join it too. Raises WeightSyncError."""
        replicas = self._replicas
        common = {
            "host": store.host,
            "port": store.port,
            "members": members.to_json(),
            "manifest": pack_manifest(plan),
            "plan_hash": plan.hash,
            # The senders' wait must end first: its error names the missing members, a timeout of this call does not.
            "timeout_s": timeout_s + EXTRA_WAIT_S,
        }
        arguments = [({**common, "replica": index},) for index in range(len(replicas))]
        watched = Group(store, members, None)
        try:
            limit = timeout_s + 2 * EXTRA_WAIT_S
            self._all(replicas, "init_weight_transfer", arguments, timeout_s=limit, group=watched)
        except CallsFailed as error:
            raise self._not_reached(error, replicas) from error

    def publish(self, group: Group, plan: BucketPlan, sync: int, version: int, timeout_s: float) -> SyncReport:
        """Take all replicas through one sync. Of `group` only the store is used.

        Raises:
            WeightSyncError: with the failed members and the replicas that must be restarted.
        """
        replicas = self._replicas
        started = time.perf_counter()
        deadline = time.monotonic() + timeout_s
        phases: dict[str, float] = {}
        phase = "pause"
        info = {"sync": sync, "version": version, "plan_hash": plan.hash}

        def call(method: str, *args: object, limit: float | None = None) -> None:
            begun = time.perf_counter()
            self._all(replicas, method, [args] * len(replicas), timeout_s=limit or self._rpc_s, group=group)
            phases[method] = time.perf_counter() - begun

        try:
            call("pause", self._recompute_kv)
            phase = "start"
            call("start_weight_update")
            phase = "update"
            remaining = max(0.1, deadline - time.monotonic())
            call("update_weights", {**info, "timeout_s": remaining}, limit=remaining + EXTRA_WAIT_S)
            reports = self._await_reports(group, plan, deadline)
            phase = "finish"
            call("finish_weight_update", str(version))
            phase = "resume"
            call("resume")
        except (CallsFailed, WeightSyncError) as error:
            raise self._explain(error, group, replicas, version, phase) from error
        total = time.perf_counter() - started
        digest_s = _digest_seconds(group.members, reports)
        return SyncReport(version, total, plan.total_bytes, len(plan.buckets), digest_s, phases)

    def _await_reports(self, group: Group, plan: BucketPlan, deadline: float) -> list[dict[str, Any]]:
        """Return every member's report, after comparing all digests with the senders'. Raises DigestMismatch."""
        reports = []
        for rank, member in enumerate(group.names):
            remaining = max(1.0, deadline - time.monotonic())
            reports.append(group.store.wait(group.key("report", rank), remaining, member, abort_key=group.abort_key))
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
        return reports

    def _explain(
        self,
        error: CallsFailed | WeightSyncError,
        group: Group,
        replicas: list[ReplicaHandle],
        version: int,
        phase: str,
    ) -> WeightSyncError:
        """Return the error with the members that failed, the replicas to restart, and the reasons."""
        reports = self._failure_reports(group)
        if isinstance(error, CallsFailed):
            reported = {group.members.replica_of(rank) for rank in reports}
            calls = [
                FailedCall(
                    f"engine {replicas[index].name}",
                    f"engine {replicas[index].name} failed in {error.method}: {_brief(failure)}",
                    silent=isinstance(failure, TimeoutError),
                )
                for index, failure in error.failures.items()
                if index not in reported
            ]
            cause = find_cause(list(reports.values()), calls)
        elif isinstance(error, DigestMismatch):
            cause = FailureCause(error.failed_members, (str(error),))
        else:
            cause = find_cause(list(reports.values()), [])
        reasons, failed_members = cause.reasons or (str(error),), cause.failed_members
        names = [replica.name for replica in replicas]
        needs_restart = names_of(group.members, failed_members) if phase == "pause" else names
        message = (
            f"weight sync of version {version} failed during {phase}: {'; '.join(reasons)}. "
            f"The version is not published; replicas to restart: {', '.join(needs_restart) or 'none'}"
        )
        logger.error("%s", message)
        return WeightSyncError(message, version=version, failed_members=failed_members, needs_restart=needs_restart)

    def _failure_reports(self, group: Group) -> dict[int, dict[str, Any]]:
        """Return the reports of the members that reported a failure, by group rank."""
        reports = {}
        for rank in range(len(group.names)):
            report = group.store.get(group.key("report", rank))
            if report is not None and report["failure"] is not None:
                reports[rank] = report
        return reports

    def after_failure(self, failure: WeightSyncError) -> None:
        """Make the replicas that must be restarted refuse requests; resume the others with the version they have."""
        for replica in self._replicas:
            try:
                if replica.name in failure.needs_restart:
                    replica.call(
                        "fail", f"was left in the middle of a failed weight sync: {failure}", timeout_s=EXTRA_WAIT_S
                    )
                else:
                    replica.call("resume", timeout_s=self._rpc_s)
            except Exception as error:  # a dead replica cannot answer, and is reported already
                logger.warning("engine %s after a failed sync: %s", replica.name, _brief(error))

    def _not_reached(self, error: CallsFailed, replicas: list[ReplicaHandle]) -> WeightSyncError:
        """Return the error of a group that could not be formed."""
        failed = [replicas[index].name for index in error.first]
        names = [f"engine {name}" for name in failed]
        reasons = [f"engine {replicas[i].name}: {_brief(e)}" for i, e in error.first.items()]
        return WeightSyncError(
            f"could not connect the weight-sync group, {error.method} failed: {'; '.join(reasons)}",
            failed_members=names,
            needs_restart=failed,
        )

    def _all(
        self,
        replicas: Sequence[ReplicaHandle],
        method: str,
        arguments: Sequence[tuple[object, ...]] | None = None,
        *,
        timeout_s: float,
        group: Group | None = None,
    ) -> list[Any]:
        """Call `method` on all replicas in parallel, and return the results in their order.

        The first failure, or with `group` a failure of any of its members, releases all members of the group from their
        waits; the calls then have EXTRA_WAIT_S to end.

        Raises:
            CallsFailed: with all failures, and those that came first.
        """
        arguments = arguments or [()] * len(replicas)
        done: queue.Queue[_Answer] = queue.Queue()
        for index, replica in enumerate(replicas):
            call = _bound_call(replica, method, arguments[index], timeout_s)
            threading.Thread(target=_run_call, args=(index, call, done), name=f"{method}-{index}", daemon=True).start()
        results: dict[int, Any] = {}
        failures: dict[int, BaseException] = {}
        first: dict[int, BaseException] = {}
        deadline = time.monotonic() + timeout_s + EXTRA_WAIT_S
        aborted = False
        while len(results) + len(failures) < len(replicas) and time.monotonic() < deadline:
            try:
                index, ok, value = done.get(timeout=POLL_S)
                (results if ok else failures)[index] = value
            except queue.Empty:
                pass  # deadline and abort are checked below
            if not aborted and (failures or (group is not None and group.aborted())):
                aborted, first = True, dict(failures)
                deadline = min(deadline, time.monotonic() + EXTRA_WAIT_S)
                if group is not None and failures:
                    index, failure = next(iter(failures.items()))
                    group.post_abort(f"engine {replicas[index].name} failed in {method}: {_brief(failure)}")
        for index in set(range(len(replicas))) - results.keys() - failures.keys():
            failures[index] = TimeoutError(f"no answer to {method} within {timeout_s:.1f} s")
        if failures:
            raise CallsFailed(method, failures, first)
        return [results[index] for index in range(len(replicas))]


def _bound_call(replica: ReplicaHandle, method: str, args: tuple[object, ...], timeout_s: float) -> Callable[[], Any]:
    return lambda: replica.call(method, *args, timeout_s=timeout_s)


def _run_call(index: int, call: Callable[[], Any], done: queue.Queue[_Answer]) -> None:
    try:
        done.put((index, True, call()))
    except BaseException as error:
        done.put((index, False, error))


def _digest_seconds(members: GroupMembers, reports: list[dict[str, Any]]) -> float:
    """Return the digest time of the slowest sender plus that of the slowest receiver, in seconds."""
    seconds = [report.get("seconds", {}).get("digest", 0.0) for report in reports]
    count = len(members.senders)
    return max(seconds[:count], default=0.0) + max(seconds[count:], default=0.0)


def _brief(error: BaseException) -> str:
    """Return the type and the last line of an error: a remote error has its traceback before that line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:500] if lines else ''}"
