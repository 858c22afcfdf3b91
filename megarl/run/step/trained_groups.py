"""The prompt groups that a step has trained, counted by the samples that its backward passes have gone through.

The rollout side settles groups by the plan of a step. The trainer counts what was really trained, so an update that
leaves out a group, or trains one twice, is found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megarl.run.step.plan import StepPlan


class CountersDiffer(RuntimeError):  # noqa: N818
    """The trainer has trained or counted other groups than the rollout side, which counts by the plans of the steps."""


class TrainedGroups(NamedTuple):
    """Numbers of groups that a step has trained.

    `new`: those that no earlier step has trained; `reused`: the others.
    """

    new: int = 0
    reused: int = 0


def count_groups(plan: StepPlan, keys: Iterable[str]) -> TrainedGroups:
    """Count the groups of the samples `keys`: those of all replicas, each as often as it was trained.

    Raises CountersDiffer unless they are the samples that the plan trains, each of them once.
    """
    times = Counter(keys)
    planned = Counter(sample.key for group in plan.shaped.groups for sample in group)
    if wrong := sorted(key for key in planned | times if planned[key] != times[key]):
        key = wrong[0]
        raise CountersDiffer(
            f"the step has trained {_groups(plan, times, planned)} groups, and rollout counts "
            f"{_groups(plan, planned, planned)} by its plan: {len(wrong)} samples were trained too often or too seldom "
            f"(the first: sample {key}, {times[key]} times instead of {planned[key]}); the run ends because its "
            "results cannot be trusted"
        )
    groups = {plan.tags[key].group_id for key in times}
    return TrainedGroups(new=len(groups - plan.reused), reused=len(groups & plan.reused))


def _groups(plan: StepPlan, times: Mapping[str, int], planned: Mapping[str, int]) -> int:
    """Return how many groups were trained with all their samples, each as often as it was."""
    rows: dict[int, list[int]] = defaultdict(list)
    for key in {**planned, **times}:
        if key in plan.tags:
            rows[plan.tags[key].group_id].append(times.get(key, 0))
    return sum(map(min, rows.values()))
