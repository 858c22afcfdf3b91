"""Numbers of prompt groups by state, and checks of a step's commit. Pure.

Invariant: at every moment `admitted == in_flight + replaced + ready + taken + trained + filtered + dropped_stale +
failed`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.rollout.admission.groups_in_flight import ReplayUse


@dataclass(frozen=True)
class Counters:
    """Numbers of prompt groups since the start of the committed history."""

    admitted: int = 0
    in_flight: int = 0
    replaced: int = 0  # finished without signal since the last step was taken
    ready: int = 0  # in the queue, not yet taken
    taken: int = 0  # by a step that is not committed, including the groups replaced before it
    trained: int = 0
    filtered: int = 0
    dropped_stale: int = 0
    failed: int = 0
    rolled_back: int = 0  # attempts that a resume discarded; not part of the history
    reusable: int = 0  # trained, but still in the queue because a step may train them again
    reused: int = 0  # uses after the first one, in committed steps; these settle nothing

    @property
    def settled(self) -> int:
        """Groups whose end is committed."""
        return self.trained + self.filtered + self.dropped_stale + self.failed

    @property
    def balanced(self) -> bool:
        """True if the invariant of the module's docstring holds."""
        return self.admitted == self.in_flight + self.replaced + self.ready + self.taken + self.settled


@dataclass(frozen=True)
class StepGroups:
    """The groups that a step has taken, each list sorted."""

    ok: list[int]
    failed: list[int]
    replaced: list[int]  # between the step before and this one
    oldest: Mapping[int, int] = field(default_factory=dict)  # version of the oldest token of each new group
    reused: Mapping[int, ReplayUse] = field(default_factory=dict)  # trained before, and now again

    @property
    def total(self) -> int:
        """The number of groups that the commit of the step settles."""
        return len(self.ok) + len(self.failed) + len(self.replaced)


def check_numbers(step: int, taken: StepGroups, numbers: Mapping[str, int]) -> None:
    """Check that `numbers`, how many groups ended in which way, add up to the groups of the step. Raises ValueError."""
    at_least = numbers["failed"] >= len(taken.failed) and numbers["filtered"] >= len(taken.replaced)
    if min(numbers.values()) < 0 or sum(numbers.values()) != taken.total or not at_least:
        replaced = f", {len(taken.replaced)} were replaced" if taken.replaced else ""
        raise ValueError(
            f"step {step}: {dict(numbers)} do not account for its {taken.total} groups, {len(taken.failed)} of them "
            f"failed in rollout{replaced}"
        )


def check_uses(
    step: int, taken: StepGroups, trained: int, reused: int, trained_groups: Iterable[int] | None, *, may_reuse: bool
) -> list[int]:
    """Check a step's trained and reused groups; return the sorted ids of the new trained groups, if they were given.

    With replay (`may_reuse`) they must be given. Raises ValueError.
    """
    if reused != len(taken.reused):
        raise ValueError(f"step {step} took {len(taken.reused)} groups to train them again, not {reused}")
    if trained_groups is None:
        if may_reuse:
            raise ValueError(f"step {step}: the ids of the trained groups are missing; groups may be used again")
        return []
    ids = sorted(trained_groups)
    if len(ids) != trained or len(set(ids)) != trained or not set(ids) <= set(taken.ok):
        raise ValueError(
            f"step {step}: {ids} cannot be its {trained} trained groups; the trainable ones are {taken.ok}"
        )
    return ids


def check_ends(step: int, taken: StepGroups, numbers: Mapping[str, int], ended: Mapping[str, Sequence[int]]) -> None:
    """Check that `ended` names each group of the step once, in agreement with the numbers. Raises ValueError."""
    counted = {name: len(groups) for name, groups in ended.items()}
    reported = sorted(group for groups in ended.values() for group in groups)
    known = sorted([*taken.ok, *taken.failed, *taken.replaced])
    if reported != known:
        unknown, missing = sorted(set(reported) - set(known)), sorted(set(known) - set(reported))
        raise ValueError(f"step {step} was committed with groups {reported}: not taken: {unknown}, missing: {missing}")
    wrong = set(taken.failed) - set(ended["failed"]) | set(taken.replaced) - set(ended["filtered"])
    if counted != dict(numbers) or wrong:
        raise ValueError(
            f"step {step} was committed with the numbers {dict(numbers)} and the groups {dict(ended)}; failed in "
            f"rollout: {taken.failed}, replaced: {taken.replaced}"
        )
