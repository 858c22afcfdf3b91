"""The meaning of a failed weight sync: which members failed, which replicas must be replaced, and why.

The leader asks: after a failure each member reports it, or answers what it was doing. `failure_cause.py` then finds the
cause in these reports and answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from megarl.common.errors import DigestMismatch, WeightSyncError
from megarl.weights.group.member_progress import Answer
from megarl.weights.group.protocols import ReplicaHandle
from megarl.weights.group.stage_end import answer_key
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers, names_of
from megarl.weights.send.failure_cause import FailedCall, FailureCause, find_cause
from megarl.weights.send.parallel_calls import CallsFailed, CutShort, brief

logger = logging.getLogger(__name__)

ANSWER_S = 1.5  # after the first failure, in which each member can say what it was doing
STAGE = "stage"  # the phase of a sync before all calls, in which the leader stages its first buckets


class FailureReader:
    """Reads what the members of a failed sync have left in the store."""

    def __init__(self, store: SyncStore, trainer_ranks: int) -> None:
        """`trainer_ranks`: how many there are."""
        self._store = store
        self._trainers = tuple(f"trainer rank {rank}" for rank in range(trainer_ranks))

    def explain(
        self,
        error: CallsFailed | WeightSyncError,
        group: Group,
        replicas: Sequence[ReplicaHandle],
        version: int,
        phase: str,
    ) -> WeightSyncError:
        """Return the error of a sync that has failed with `error` in `phase`, and release all members from their waits.

        It has the failed members, the replicas that must be replaced even if the sync is repeated, and the reasons.
        """
        group.post_abort(f"the sync failed during {phase}: {brief(error)}")
        # Before its update no engine takes part in broadcasts: that it is silent then says nothing.
        workers = group.names[len(group.members.senders) :]
        uncalled = workers if phase in (STAGE, "pause", "start") else []
        answers = self._answers(group, [] if uncalled else workers)
        reports = self._failure_reports(group)
        if isinstance(error, DigestMismatch):
            cause = FailureCause(error.failed_members, (str(error),))
        else:
            reported = {group.members.replica_of(rank) for rank in reports if isinstance(rank, int)}
            calls = _failed_calls(error, replicas, phase, reported) if isinstance(error, CallsFailed) else []
            cause = find_cause(list(reports.values()), calls, answers, group.names, uncalled)
        reasons, failed_members = cause.reasons or (str(error),), cause.failed_members
        needs_restart = unusable(group.members, failed_members, phase)
        message = f"weight sync of version {version} failed during {phase}: {'; '.join(reasons)}"
        logger.error("%s", message)
        return WeightSyncError(
            message,
            version=version,
            failed_members=failed_members,
            needs_restart=needs_restart,
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


def _failed_calls(
    error: CallsFailed, replicas: Sequence[ReplicaHandle], phase: str, reported: set[int | None]
) -> list[FailedCall]:
    """Return the calls that failed, except those to replicas of which a worker has reported its failure."""
    return [
        FailedCall(
            f"engine {replicas[index].name}",
            f"engine {replicas[index].name} failed in {error.method}: {brief(failure)}",
            # Only in its update does a replica wait for other members.
            silent=isinstance(failure, CutShort) or (isinstance(failure, TimeoutError) and phase == "update"),
        )
        for index, failure in error.failures.items()
        if index not in reported
    ]


def unusable(members: GroupMembers, failed_members: Sequence[str], phase: str) -> Sequence[str]:
    """Return the replicas that a failure in `phase` leaves unusable.

    Unless engines alone are known to have failed, every replica that may have begun to load is in doubt.
    """
    if phase == STAGE:  # no replica was called: all go on with the weights they have
        return ()
    failed = names_of(members, failed_members)
    in_doubt = not failed or any(name.startswith("trainer rank") for name in failed_members)
    return members.replicas if in_doubt and phase != "pause" else failed
