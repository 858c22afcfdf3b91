"""Checks that the commit of a step accounts for the prompt groups that the step has taken, each of them once. Pure.

All raise ValueError. `numbers`: how many groups the commit says have ended in which way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megarl.rollout.admission.counters import Taken


def check_numbers(step: int, taken: Taken, numbers: Mapping[str, int]) -> None:
    """Check that the numbers add up to the groups of the step, and contain those that ended before the trainer."""
    at_least = numbers["failed"] >= len(taken.failed) and numbers["filtered"] >= len(taken.replaced)
    if min(numbers.values()) < 0 or sum(numbers.values()) != taken.total or not at_least:
        replaced = f", {len(taken.replaced)} were replaced" if taken.replaced else ""
        raise ValueError(
            f"step {step}: {dict(numbers)} do not account for its {taken.total} groups, {len(taken.failed)} of them "
            f"failed in rollout{replaced}"
        )


def check_uses(
    step: int, taken: Taken, trained: int, reused: int, trained_groups: Iterable[int] | None, *, may_reuse: bool
) -> list[int]:
    """Check the trained groups, and how many were trained again; return the ids of the new ones that were trained.

    None of them if they were not told, which they must be if groups may be used again (`may_reuse`).
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


def check_ends(step: int, taken: Taken, numbers: Mapping[str, int], ended: Mapping[str, Sequence[int]]) -> None:
    """Check that `ended` names each group that the step has taken once, in agreement with the numbers."""
    counted = {name: len(groups) for name, groups in ended.items()}
    told = sorted(group for groups in ended.values() for group in groups)
    known = sorted([*taken.ok, *taken.failed, *taken.replaced])
    if told != known:
        unknown, missing = sorted(set(told) - set(known)), sorted(set(known) - set(told))
        raise ValueError(f"step {step} was committed with groups {told}: not taken: {unknown}, missing: {missing}")
    wrong = set(taken.failed) - set(ended["failed"]) | set(taken.replaced) - set(ended["filtered"])
    if counted != dict(numbers) or wrong:
        raise ValueError(
            f"step {step} was committed with the numbers {dict(numbers)} and the groups {dict(ended)}; failed in "
            f"rollout: {taken.failed}, replaced: {taken.replaced}"
        )
