"""Finds which members caused a failed weight sync, from their reports and the replicas' failed calls. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FailedCall:
    """A call to a replica that raised, while none of the replica's workers reported a failure."""

    replica: str  # e.g. `engine replica 1`
    reason: str
    silent: bool  # no answer in time: the replica may be dead, stopped, or still busy


@dataclass(frozen=True)
class FailureCause:
    """The members or replicas that failed first, and the reasons; there may be a reason without a member."""

    failed_members: tuple[str, ...]
    reasons: tuple[str, ...]


def find_cause(reports: Sequence[dict[str, Any]], calls: Iterable[FailedCall]) -> FailureCause:
    """Return the cause by the most direct evidence there is, in this order:

    1. a member's own failure (bad digest, failed load, failed gather), or a replica that died;
    2. an expired wait: the members that were waited for, without those that were themselves waiting;
    3. a replica that did not answer;
    4. only lost connections: no member is named, and the first report is the reason.

    `reports`: those of failed members, each {member, failure, secondary, failed_members}.
    """
    calls = list(calls)
    own = [r for r in reports if not r["secondary"] and not r.get("failed_members")]
    dead = [call for call in calls if not call.silent]
    if own or dead:
        return FailureCause(
            _unique([*(r["member"] for r in own), *(call.replica for call in dead)]),
            _unique([*(f"{r['member']}: {r['failure']}" for r in own), *(call.reason for call in dead)]),
        )
    waits = [r for r in reports if r.get("failed_members")]
    if waits:
        waiting = {r["member"] for r in reports}
        awaited = _unique(name for r in waits for name in r["failed_members"])
        absent = tuple(name for name in awaited if name not in waiting) or awaited
        return FailureCause(absent, _unique(r["failure"] for r in waits if set(r["failed_members"]) & set(absent)))
    if calls:
        return FailureCause(_unique(call.replica for call in calls), _unique(call.reason for call in calls))
    return FailureCause((), tuple(r["failure"] for r in reports[:1]))


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
