"""Interprets a failed weight sync: which members failed, which replicas must be replaced, and why.

After a failure each member reports it to the leader, or what it was doing. The cause follows from these answers.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.common.errors import DigestMismatch, WeightSyncError
from megarl.weights.group.protocols import ReplicaHandle
from megarl.weights.group.stage import Answer, answer_key
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers, names_of

logger = logging.getLogger(__name__)

ANSWER_S = 1.5  # after the first failure, in which each member can say what it was doing
STAGE = "stage"  # the phase of a sync before all calls, in which the leader stages its first buckets
BEFORE_LOADING = (STAGE, "pause", "wake")  # phases in which no replica can have begun to load


class CutShort(TimeoutError):  # noqa: N818
    """A call that had not ended soon after the failure of another member; it may only have needed longer."""


class CallsFailed(Exception):  # noqa: N818
    """Calls to some replicas raised. `failures`: the exceptions by index of the replica; `first`: the earliest ones.

    `results`: those of the other replicas, by index.
    """

    def __init__(
        self,
        method: str,
        failures: dict[int, BaseException],
        first: dict[int, BaseException],
        results: dict[int, Any] | None = None,
    ) -> None:
        super().__init__(method)
        self.method = method
        self.failures = failures
        self.first = first or failures
        self.results = results or {}


def brief(error: BaseException) -> str:
    """Return the type and the last line of an error: a remote error has its traceback before that line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:500] if lines else ''}"


def explain(
    error: CallsFailed | WeightSyncError,
    group: Group,
    store: SyncStore,
    trainer_ranks: int,
    replicas: Sequence[ReplicaHandle],
    version: int,
    phase: str,
) -> WeightSyncError:
    """Return the error of a sync that has failed with `error` in `phase`, and release all members from their waits.

    It has the failed members, the replicas that must be replaced even if the sync is repeated, and the reasons.
    """
    group.post_abort(f"the sync failed during {phase}: {brief(error)}")
    trainers = [f"trainer rank {rank}" for rank in range(trainer_ranks)]
    # Before its update no engine takes part in broadcasts, so its silence means nothing.
    workers = group.names[len(group.members.senders) :]
    uncalled = workers if phase in (*BEFORE_LOADING, "start") else []
    asked = [answer_key(group.stage, name) for name in (*trainers, *([] if uncalled else workers))]
    store.block_all(asked, ANSWER_S)
    answers = [Answer(**fields) for key in asked if (fields := store.get(key)) is not None]
    if isinstance(error, DigestMismatch):
        cause = FailureCause(error.failed_members, (str(error),))
    else:
        reported = names_of(group.members, [answer.member for answer in answers if answer.failure is not None])
        calls = _failed_calls(error, replicas, phase, reported) if isinstance(error, CallsFailed) else []
        cause = find_cause(answers, calls, group.names, uncalled)
    message = f"weight sync of version {version} failed during {phase}: {'; '.join(cause.reasons or (str(error),))}"
    logger.error("%s", message)
    return WeightSyncError(
        message,
        version=version,
        failed_members=cause.failed_members,
        needs_restart=unusable(group.members, cause.failed_members, phase),
    )


@dataclass(frozen=True)
class FailedCall:
    """A call to a replica that raised, while none of the replica's workers reported a failure."""

    replica: str  # e.g. `engine replica 1`
    reason: str
    silent: bool  # no answer in time while its workers took part in broadcasts, so it may have waited for others


def _failed_calls(
    error: CallsFailed, replicas: Sequence[ReplicaHandle], phase: str, reported: Sequence[str]
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
        if replicas[index].name not in reported
    ]


def unusable(members: GroupMembers, failed_members: Sequence[str], phase: str) -> Sequence[str]:
    """Return the replicas that a failure in `phase` leaves unusable.

    Unless engines alone are known to have failed, every replica that may have begun to load is in doubt.
    """
    if phase == STAGE:  # no replica was called: all continue with their weights
        return ()
    failed = names_of(members, failed_members)
    in_doubt = not failed or any(name.startswith("trainer rank") for name in failed_members)
    return members.replicas if in_doubt and phase not in BEFORE_LOADING else failed


@dataclass(frozen=True)
class FailureCause:
    """The members or replicas that failed first, and the reasons; there may be a reason without a member."""

    failed_members: tuple[str, ...]
    reasons: tuple[str, ...]


def find_cause(
    answers: Sequence[Answer],
    calls: Iterable[FailedCall],
    group: Sequence[str] = (),
    uncalled: Collection[str] = (),
) -> FailureCause:
    """Return the cause by the most direct evidence there is, in this order:

    1. a member's own failure (bad digest, failed load, failed gather), or a replica that died or refused;
    2. after a deadline, the members that others wait for and that wait for nobody themselves: they work, or are silent;
    3. a replica that did not answer;
    4. nobody is named: connections were lost, or the waits form a circle. All waits are the reasons.

    `answers`: what the members were doing, or how they failed. `group`: the members that broadcast. `uncalled`: those
    of them that were not asked to yet, so a wait for them is no failure.
    """
    calls = list(calls)
    own = [answer for answer in answers if answer.failure is not None and not answer.secondary]
    dead = [call for call in calls if not call.silent]
    if own or dead:
        return FailureCause(
            _unique([*(answer.member for answer in own), *(call.replica for call in dead)]),
            _unique([*(f"{answer.member}: {answer.failure}" for answer in own), *(call.reason for call in dead)]),
        )
    waits = waits_of(answers, group)
    done = {answer.member for answer in answers if answer.done} | set(uncalled)
    stuck = tuple(name for name in stuck_members(waits) if name not in done)
    if stuck and any(answer.expired for answer in answers):
        return FailureCause(stuck, _reasons(answers, waits, set(stuck)))
    if calls:
        return FailureCause(_unique(call.replica for call in calls), _unique(call.reason for call in calls))
    seen = [answer.failure for answer in answers if answer.failure is not None][:1]
    return FailureCause(
        (), _unique([*seen, *_reasons(answers, waits, {name for names in waits.values() for name in names})])
    )


def stuck_members(waits: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the members that others wait for and that do not wait themselves.

    `waits`: for each member that answered, whom it waits for; a silent member has no entry. A member that waits is
    never named, so a circle of waits names none.
    """
    return _unique(name for names in waits.values() for name in names if not waits.get(name))


def waits_of(answers: Sequence[Answer], group: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return for each member that answered whom it waits for.

    A member in a broadcast waits for those of `group` that have not begun to take part in it, or did not answer.
    """
    entered = {answer.member: answer.entered for answer in answers}
    waits = {}
    for answer in answers:
        bucket = answer.bucket
        if bucket is None:
            waits[answer.member] = tuple(answer.waits_for)
        else:
            others = (name for name in group if name != answer.member)
            waits[answer.member] = tuple(name for name in others if entered.get(name, 0) <= bucket)
    return waits


def _reasons(answers: Sequence[Answer], waits: Mapping[str, Sequence[str]], awaited: set[str]) -> tuple[str, ...]:
    """Describe how long and where members wait for one of `awaited`, and what the answering ones do."""
    lines = []
    for answer in answers:
        names = [name for name in waits[answer.member] if name in awaited]
        if names:
            lines.append(f"{answer.member} waited {answer.seconds:.1f} s for {', '.join(names)} in {answer.doing}")
    for answer in answers:
        if answer.member in awaited and not waits[answer.member]:
            lines.append(f"{answer.member}: {answer.doing} (for {answer.seconds:.1f} s)")
    return tuple(lines)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
