"""The leader's part of a weight sync: calls to the replicas, checks before a version is published, causes of failures.

Order of one sync, over all replicas: wait until the leader has staged its first buckets, while they generate -> pause
-> start -> update (all buckets) -> compare every worker's digests with the senders' -> finish, which sets the version
-> resume. After a failure between start and finish the replicas are not resumed: if the sync is repeated, those that
failed are replaced, and the others give up what they have loaded, stay paused and load all of it again; if not, all
must be replaced. A replica that keeps its version goes through the same calls, because all members take part in a
broadcast; it drops what it receives, and keeps its KV cache and its label.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from megarl.common.errors import DigestMismatch, PeerTimeout, SyncAborted, WeightSyncError
from megarl.telemetry import events
from megarl.weights.background_call import BackgroundCall
from megarl.weights.buckets import BucketPlan, pack_manifest
from megarl.weights.failure_cause import FailedCall, FailureCause, find_cause
from megarl.weights.handles import ABANDON, EngineHandles, ReplicaHandle
from megarl.weights.member_progress import Answer
from megarl.weights.receiver import NOT_LOADED
from megarl.weights.store import SyncStore
from megarl.weights.transport import POLL_S, Group, GroupMembers, end_forming, forming_failed, names_of
from megarl.weights.watch import answer_key

logger = logging.getLogger(__name__)

EXTRA_WAIT_S = 3.0  # after the first failure, in which the calls to the other replicas can end
# The part of a sync that each call to the replicas belongs to; before the first one the leader stages its buckets.
_STAGE = "stage"
_PHASES = {
    "pause": "pause",
    "start_weight_update": "start",
    "update_weights": "update",
    "finish_weight_update": "finish",
    "resume": "resume",
}
ANSWER_S = 1.5  # after the first failure, in which each member can say what it was doing


@dataclass(frozen=True)
class SyncReport:
    """The facts of one published version, equal on every trainer rank; times in seconds, sizes in bytes."""

    version: int
    seconds: float
    bytes: int
    buckets: int
    digest_seconds: float  # of the slowest sender plus those of the slowest receiver, which partly overlap
    pause_seconds: (
        float  # from the first call of `pause` (a replica stops before it answers) until the last one has resumed
    )
    phases: dict[str, float] = field(default_factory=dict)  # seconds by the called method; "stage": before all calls
    restarted: tuple[str, ...] = ()  # replicas that failed, and were replaced or left out before the sync succeeded


@dataclass(frozen=True)
class _Returned:
    """The end of one call to replica number `index`, at `time.monotonic`: its result, or the exception."""

    index: int
    value: object
    error: BaseException | None
    at: float


class CutShort(TimeoutError):  # noqa: N818
    """A call that had not ended soon after the failure of another member: it may have needed longer only."""


class CallsFailed(Exception):  # noqa: N818
    """Calls to some replicas raised. `failures`: the exceptions by index of the replica; `first`: the earliest ones."""

    def __init__(self, method: str, failures: dict[int, BaseException], first: dict[int, BaseException]) -> None:
        super().__init__(method)
        self.method = method
        self.failures = failures
        self.first = first or failures


class EngineCalls:
    """Calls the replicas, on the leader."""

    def __init__(
        self, handles: EngineHandles, store: SyncStore, trainer_ranks: int, rpc_s: float, recompute_kv: bool
    ) -> None:
        """`store`: a connection of its own; `trainer_ranks`: how many there are."""
        self.handles = handles
        self._store = store
        self._trainers = tuple(f"trainer rank {rank}" for rank in range(trainer_ranks))
        self._rpc_s = rpc_s
        self._recompute_kv = recompute_kv
        # The replicas of this generation: the pool may drop a dead replica, but the error must still name it.
        self._replicas: list[ReplicaHandle] = []
        self._called = True  # whether the replicas may have been told of the current sync
        self._ways: dict[str, str] = {}  # in which each engine worker has loaded last

    def members(self, generation: int, senders: Sequence[int], backend: str, sync_s: float) -> GroupMembers:
        """Return the members of a new generation. Asks every replica for its number of workers."""
        replicas = self._replicas = list(self.handles.replicas())
        try:
            sizes = self._all(replicas, "world_size", timeout_s=self._rpc_s)
        except CallsFailed as error:
            raise self._not_reached(error, replicas) from error
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
        release = _Release(
            lambda: forming_failed(store, generation), lambda reason: end_forming(store, generation, reason)
        )
        try:
            limit = timeout_s + 2 * EXTRA_WAIT_S
            self._all(replicas, "init_weight_transfer", arguments, timeout_s=limit, release=release)
        except CallsFailed as error:
            raise self._not_reached(error, replicas) from error

    def publish(
        self,
        group: Group,
        plan: BucketPlan,
        sync: int,
        version: int,
        timeout_s: float,
        staged: threading.Event,
        keep: Collection[str] = (),
    ) -> SyncReport:
        """Take all replicas through one sync, in which `group` has begun. Does not end the sync if it succeeds.

        `staged`: set when the leader has staged its first buckets; until then the replicas generate. `keep`: the names
        of replicas that keep their weights and their version.

        Raises:
            WeightSyncError: with the failed members, the replicas that must be replaced, and those that need not if
                the sync is repeated.
        """
        replicas = self._replicas
        started = time.monotonic()
        deadline = started + timeout_s
        phases: dict[str, float] = {}
        phase, self._called = _STAGE, False
        info = {"sync": sync, "version": version, "layer_span": plan.layer_span, "plan_hash": plan.hash}
        release = _Release(group.aborted, group.post_abort)

        def call(
            method: str, *args: object, kept: tuple[object, ...] = (), limit: float | None = None
        ) -> list[_Returned]:
            """Call `method` with `args`, and with `kept` on the replicas that keep their version."""
            nonlocal phase
            if group.aborted() and method != "resume":  # another member failed: go no further
                raise SyncAborted(group.abort_reason or "")
            phase, self._called = _PHASES[method], True
            begun = time.monotonic()
            arguments = [kept if replica.name in keep else args for replica in replicas]
            returned = self._all(replicas, method, arguments, timeout_s=limit or self._rpc_s, release=release)
            ended = time.monotonic()
            phases[method] = ended - begun
            events.record(f"sync_{phase}", begun, ended, key=version, version=version)
            return returned

        try:
            _await_staged(staged, group, timeout_s)
            pause_begun = time.monotonic()
            phases[phase] = pause_begun - started
            events.record("sync_stage", started, pause_begun, key=version, version=version)
            call("pause", self._recompute_kv, kept=(False, True))
            call("start_weight_update")
            remaining = max(0.1, deadline - time.monotonic())
            update = {**info, "timeout_s": remaining, "load": True}
            call("update_weights", update, kept=({**update, "load": False},), limit=remaining + EXTRA_WAIT_S)
            reports = self._await_reports(group, plan, deadline)
            call("finish_weight_update", str(version), kept=(None,))
            resumed = call("resume")
        except (CallsFailed, WeightSyncError) as error:
            raise self._explain(error, group, replicas, version, phase) from error
        total = time.monotonic() - started
        pause_s = max(each.at for each in resumed) - pause_begun
        digest_s = _digest_seconds(group.members, reports)
        self._log_ways(version, reports[len(group.members.senders) :])
        return SyncReport(version, total, plan.total_bytes, len(plan.buckets), digest_s, pause_s, phases)

    def _log_ways(self, version: int, reports: Sequence[dict[str, Any]]) -> None:
        """Log in which ways the engines load, if that of a worker differs from its last one."""
        before, self._ways = self._ways, ways_of(reports, self._ways)
        if self._ways != before:
            logger.info("weights of version %d: %s", version, _by_way(self._ways))

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

    def _explain(
        self,
        error: CallsFailed | WeightSyncError,
        group: Group,
        replicas: list[ReplicaHandle],
        version: int,
        phase: str,
    ) -> WeightSyncError:
        """Return the error with the members that failed, the replicas to restart, and the reasons."""
        group.post_abort(f"the sync failed during {phase}: {_brief(error)}")
        # Before its update no engine takes part in broadcasts: that it is silent then says nothing.
        workers = group.names[len(group.members.senders) :]
        uncalled = workers if phase in (_STAGE, "pause", "start") else []
        answers = self._answers(group, [] if uncalled else workers)
        reports = self._failure_reports(group)
        if isinstance(error, DigestMismatch):
            cause = FailureCause(error.failed_members, (str(error),))
        else:
            reported = {group.members.replica_of(rank) for rank in reports if isinstance(rank, int)}
            failures, method = (error.failures, error.method) if isinstance(error, CallsFailed) else ({}, "")
            calls = [
                FailedCall(
                    f"engine {replicas[index].name}",
                    f"engine {replicas[index].name} failed in {method}: {_brief(failure)}",
                    # Only in its update does a replica wait for other members.
                    silent=isinstance(failure, CutShort) or (isinstance(failure, TimeoutError) and phase == "update"),
                )
                for index, failure in failures.items()
                if index not in reported
            ]
            cause = find_cause(list(reports.values()), calls, answers, group.names, uncalled)
        reasons, failed_members = cause.reasons or (str(error),), cause.failed_members
        needs_restart, interrupted = _left_behind(group.members, failed_members, phase)
        message = (
            f"weight sync of version {version} failed during {phase}: {'; '.join(reasons)}. "
            f"The version is not published; replicas to replace: {', '.join(needs_restart) or 'none'}"
        )
        if interrupted:
            message += f"; interrupted: {', '.join(interrupted)}"
        logger.error("%s", message)
        return WeightSyncError(
            message,
            version=version,
            failed_members=failed_members,
            needs_restart=needs_restart,
            interrupted=interrupted,
        )

    def _answers(self, group: Group, workers: Sequence[str]) -> list[Answer]:
        """Return what the trainer ranks and `workers` were doing when the sync failed, of those that answer in time."""
        names = (*self._trainers, *workers)
        keys = [answer_key(group.stage, name) for name in names]
        self._store.block_all(keys, ANSWER_S)
        found = [self._store.get(key) for key in keys]
        return [Answer.from_json(fields) for fields in found if fields is not None]

    def _failure_reports(self, group: Group) -> dict[int | str, dict[str, Any]]:
        """Return the reports of a failure, by group rank; those of ranks that do not broadcast by name."""
        reports: dict[int | str, dict[str, Any]] = {}
        others = [name for name in self._trainers if name not in group.names]
        for place in (*range(len(group.names)), *others):
            report = self._store.get(group.key("report", place))
            if report is not None and report["failure"] is not None:
                reports[place] = report
        return reports

    def after_failure(self, failure: WeightSyncError, *, repeats: bool) -> list[str]:
        """Prepare the replicas for what follows a failed sync; return the names of those that must be replaced.

        If the sync `repeats`, those that others have interrupted give up what they have loaded, and stay paused. One
        that cannot, and all that must be replaced, refuse requests from now on. The others resume with the version they
        have; if the sync failed before they were paused, they are left alone. All at the same time: the trainer ranks
        wait for the outcome, and a replica that hangs takes EXTRA_WAIT_S to refuse requests, or `rpc_s` otherwise.
        """
        replicas = self._replicas if self._called else []
        calls = [BackgroundCall(self._release_replica, replica, failure, repeats) for replica in replicas]
        replaced = [replica.name for replica, call in zip(replicas, calls, strict=True) if call.result()]
        return replaced if self._called else list(failure.needs_restart)

    def _release_replica(self, replica: ReplicaHandle, failure: WeightSyncError, repeats: bool) -> bool:
        """Do what `after_failure` says with one replica; tell whether it must be replaced."""
        reason = f"was left in the middle of a failed weight sync: {failure}"
        replaced = replica.name in failure.needs_restart
        if replica.name in failure.interrupted:
            replaced = not repeats
            if repeats:
                try:
                    replica.call("abandon_weight_update", ABANDON, timeout_s=self._rpc_s)
                    return False
                except Exception as error:
                    replaced, reason = True, f"could not give up a failed weight sync: {_brief(error)}"
                    logger.warning("engine %s %s", replica.name, reason)
        try:
            if replaced:
                replica.call("fail", reason, timeout_s=EXTRA_WAIT_S)
            else:
                replica.call("resume", timeout_s=self._rpc_s)
        except Exception as error:  # a dead replica cannot answer, and is reported already
            logger.warning("engine %s after a failed sync: %s", replica.name, _brief(error))
        return replaced

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
        release: _Release | None = None,
    ) -> list[_Returned]:
        """Call `method` on all replicas in parallel, and return the results in their order.

        The first failure, or with `release` a failure of any member, releases all members from their waits; the calls
        then have EXTRA_WAIT_S to end.

        Raises:
            CallsFailed: with all failures, and those that came first.
        """
        arguments = arguments or [()] * len(replicas)
        done: queue.Queue[_Returned] = queue.Queue()
        for index, replica in enumerate(replicas):
            call = _bound_call(replica, method, arguments[index], timeout_s)
            threading.Thread(target=_run_call, args=(index, call, done), name=f"{method}-{index}", daemon=True).start()
        returned: dict[int, _Returned] = {}
        first: dict[int, BaseException] = {}
        deadline = time.monotonic() + timeout_s + EXTRA_WAIT_S
        aborted = False
        while len(returned) < len(replicas) and time.monotonic() < deadline:
            each = _next_returned(done)
            if each is not None:
                returned[each.index] = each
            failures = {index: each.error for index, each in returned.items() if each.error is not None}
            if not aborted and (failures or (release is not None and release.aborted())):
                aborted, first = True, dict(failures)
                deadline = min(deadline, time.monotonic() + EXTRA_WAIT_S)
                if release is not None and failures:
                    index, failure = next(iter(failures.items()))
                    release.abort(f"engine {replicas[index].name} failed in {method}: {_brief(failure)}")
        failures = {index: each.error for index, each in returned.items() if each.error is not None}
        for index in set(range(len(replicas))) - returned.keys():
            failures[index] = (
                CutShort(f"no answer to {method} within {EXTRA_WAIT_S:.1f} s after the failure of another member")
                if aborted
                else TimeoutError(f"no answer to {method} within {timeout_s:.1f} s")
            )
        if failures:
            raise CallsFailed(method, failures, first)
        return [returned[index] for index in range(len(replicas))]


@dataclass(frozen=True)
class _Release:
    """Tells calls that a member has failed elsewhere, and releases the members when a call fails."""

    aborted: Callable[[], bool]
    abort: Callable[[str], None]


def _left_behind(
    members: GroupMembers, failed_members: Sequence[str], phase: str
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the replicas that a failure in `phase` leaves unusable, and those that it has only interrupted.

    Unless engines alone are known to have failed, every replica that may have begun to load is in doubt.
    """
    if phase == _STAGE:  # no replica was called: all go on with the weights they have
        return (), ()
    failed = names_of(members, failed_members)
    if phase == "pause":
        return failed, ()
    if not failed or any(name.startswith("trainer rank") for name in failed_members):
        return members.replicas, ()
    return failed, [name for name in members.replicas if name not in failed]


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


def _bound_call(
    replica: ReplicaHandle, method: str, args: tuple[object, ...], timeout_s: float
) -> Callable[[], object]:
    return lambda: replica.call(method, *args, timeout_s=timeout_s)


def _next_returned(done: queue.Queue[_Returned]) -> _Returned | None:
    """Return the next call that has returned, or None after POLL_S: then deadline and abort are looked at."""
    try:
        return done.get(timeout=POLL_S)
    except queue.Empty:
        return None


def _run_call(index: int, call: Callable[[], object], done: queue.Queue[_Returned]) -> None:
    try:
        value = call()
        done.put(_Returned(index, value, None, time.monotonic()))
    except BaseException as error:
        done.put(_Returned(index, None, error, time.monotonic()))


def ways_of(reports: Sequence[dict[str, Any]], before: Mapping[str, str]) -> dict[str, str]:
    """Return in which way each engine worker has loaded last, from the reports and the ways of the version before.

    Workers of a replica that keeps its version have not loaded now.
    """
    loaded = {report["member"]: report["loaded"] for report in reports}
    last = {member: before.get(member) if way == NOT_LOADED else way for member, way in loaded.items()}
    return {member: way for member, way in last.items() if way is not None}


def _by_way(ways: Mapping[str, str]) -> str:
    """Return which engine workers load in which way as text, `ways` by worker."""
    workers: dict[str, list[str]] = {}
    for member, way in ways.items():
        workers.setdefault(way, []).append(member)
    if len(workers) == 1:
        return f"{next(iter(workers))} (all {len(ways)} engine workers)"
    return "; ".join(f"{way} ({', '.join(names)})" for way, names in workers.items())


def _digest_seconds(members: GroupMembers, reports: list[dict[str, Any]]) -> float:
    """Return the digest time of the slowest sender plus that of the slowest receiver, in seconds."""
    seconds = [report.get("seconds", {}).get("digest", 0.0) for report in reports]
    count = len(members.senders)
    return max(seconds[:count], default=0.0) + max(seconds[count:], default=0.0)


def _brief(error: BaseException) -> str:
    """Return the type and the last line of an error: a remote error has its traceback before that line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:500] if lines else ''}"
