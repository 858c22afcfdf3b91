"""Finds which members caused a failed weight sync, from what all members report. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.weights.group.member_progress import Answer


@dataclass(frozen=True)
class FailedCall:
    """A call to a replica that raised, while none of the replica's workers reported a failure."""

    replica: str  # e.g. `engine replica 1`
    reason: str
    silent: bool  # no answer in time while its workers took part in broadcasts, so it may have waited for others


@dataclass(frozen=True)
class FailureCause:
    """The members or replicas that failed first, and the reasons; there may be a reason without a member."""

    failed_members: tuple[str, ...]
    reasons: tuple[str, ...]


def find_cause(
    reports: Sequence[dict[str, Any]],
    calls: Iterable[FailedCall],
    answers: Sequence[Answer] = (),
    group: Sequence[str] = (),
    uncalled: Collection[str] = (),
) -> FailureCause:
    """Return the cause by the most direct evidence there is, in this order:

    1. a member's own failure (bad digest, failed load, failed gather), or a replica that died or refused;
    2. after a deadline, the members that others wait for and that wait for nobody themselves: they work, or are silent;
    3. a replica that did not answer;
    4. nobody is named: connections were lost, or the waits form a circle. All waits are the reasons.

    `reports`: those of failed members, each {member, failure, secondary}; `secondary` means that the member waited for
    another one, or saw its failure. `answers`: what the members were doing; `group`: those that broadcast.
    `uncalled`: those of them that were not asked to yet, so that a wait for them is nobody's failure.
    """
    calls = list(calls)
    own = [r for r in reports if not r["secondary"]]
    dead = [call for call in calls if not call.silent]
    if own or dead:
        return FailureCause(
            _unique([*(r["member"] for r in own), *(call.replica for call in dead)]),
            _unique([*(f"{r['member']}: {r['failure']}" for r in own), *(call.reason for call in dead)]),
        )
    waits = waits_of(answers, group)
    done = {answer.member for answer in answers if answer.done} | set(uncalled)
    stuck = tuple(name for name in stuck_members(waits) if name not in done)
    if stuck and any(answer.expired for answer in answers):
        return FailureCause(stuck, _reasons(answers, waits, set(stuck)))
    if calls:
        return FailureCause(_unique(call.replica for call in calls), _unique(call.reason for call in calls))
    seen = tuple(r["failure"] for r in reports[:1])
    return FailureCause(
        (), _unique([*seen, *_reasons(answers, waits, {name for names in waits.values() for name in names})])
    )


def stuck_members(waits: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the members that others wait for and that do not wait themselves.

    `waits`: for each member that answered, whom it waits for; a silent member has no entry. A member that waits is
    never named, so a circle of waits names nobody.
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
            waits[answer.member] = answer.waits_for
        else:
            others = (name for name in group if name != answer.member)
            waits[answer.member] = tuple(name for name in others if entered.get(name, 0) <= bucket)
    return waits


def _reasons(answers: Sequence[Answer], waits: Mapping[str, Sequence[str]], awaited: set[str]) -> tuple[str, ...]:
    """Say of all who wait for one of `awaited` how long and where, and what those do that answered."""
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
