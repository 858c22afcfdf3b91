"""The plan of one training step: which samples of a batch it trains, in which mini-batch and on which DP rank.

It is pure: every rank computes the same plan from the same tags without communication, and the ranks compare its hash.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeVar

from megarl.algorithms.filters import ShapedBatch, alive_samples, shape_batch
from megarl.common.values import first_parts
from megarl.config.derived.algorithm import advantage_of, shaping_of
from megarl.config.derived.datasets import response_limits
from megarl.config.derived.staleness import pace_of, refill_groups
from megarl.config.schema import Config
from megarl.queue.trajectory import SampleTag
from megarl.trainer.packing import assign_to_ranks, partition_hash

T = TypeVar("T")


class ReuseError(ValueError):
    """A group that an earlier step has trained cannot be trained again."""


@dataclass(frozen=True)
class GroupOutcome:
    """Numbers of groups by how they ended; every admitted group ends in exactly one of the first four ways.

    `reused`: groups that an earlier step has trained and settled, and that this one trains again.
    """

    trained: int
    filtered: int
    dropped_stale: int
    failed: int
    reused: int = 0


@dataclass(frozen=True)
class StepPlan:
    """The samples that a step trains on. `mini_batches[m][d]`: keys of the samples of mini-batch m on DP rank d.

    `tags`: of all samples of the batch, by key. `version`: of the weights that the step updates. `stale`: keys of the
    samples of groups dropped as stale. `reused`: ids of groups that an earlier step has trained. `replaced`: ids of
    groups without signal that rollout replaced before the batch. `not_finite`: ids of groups that the step would have
    trained if their loss or gradient were finite.
    """

    tags: dict[str, SampleTag]
    shaped: ShapedBatch
    mini_batches: list[list[list[str]]]
    outcome: GroupOutcome
    version: int
    stale: list[str] = field(default_factory=list)
    reused: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()
    not_finite: frozenset[int] = frozenset()

    @property
    def admitted(self) -> frozenset[int]:
        """The ids of the groups that the step settles, as the rollout side has named them."""
        return frozenset(tag.group_id for tag in self.new_tags) | self.replaced

    @property
    def ended(self) -> dict[str, list[int]]:
        """The same ids by how the groups ended, each list sorted; found without the numbers in `outcome`."""
        stale = {self.tags[key].group_id for key in self.stale}
        usable = Counter(tag.group_id for tag in first_parts(self.new_tags) if not tag.failed)
        trained = set(self.trained_groups)
        failed = {group for group in self.admitted - self.replaced if usable[group] < 2} | self.not_finite
        filtered = self.admitted - trained - stale - failed
        ends = {"trained": trained, "filtered": filtered, "dropped_stale": stale, "failed": failed}
        return {name: sorted(groups) for name, groups in ends.items()}

    @property
    def new_tags(self) -> list[SampleTag]:
        """The tags of the samples that no earlier step has trained."""
        return [tag for tag in self.tags.values() if tag.group_id not in self.reused]

    @property
    def trained_groups(self) -> list[int]:
        """The ids of the groups that this step is the first to train, sorted."""
        groups = {sample.group_id for group in self.shaped.groups for sample in group}
        return sorted(groups - self.reused)

    def skipped(self) -> StepPlan | None:
        """Return the plan of the same batch with nothing to train, whose groups have failed.

        None if it trains groups that an earlier step has trained: these are settled and cannot fail.
        """
        if self.reused:
            return None
        outcome = replace(self.outcome, trained=0, failed=self.outcome.failed + self.outcome.trained)
        shaped = replace(self.shaped, groups=[], trained_groups=0)
        lost = frozenset(self.trained_groups)
        return replace(self, shaped=shaped, mini_batches=[], outcome=outcome, not_finite=lost)

    def keys_of(self, dp_rank: int) -> list[str]:
        """Return the keys of the rows that a DP rank must fetch, in the order in which it trains on them."""
        return [key for mini_batch in self.mini_batches for key in mini_batch[dp_rank]]

    @property
    def hash(self) -> str:
        """A digest of the assignment, which all ranks compare."""
        return partition_hash(self.mini_batches)


def plan_step(
    tags: Sequence[SampleTag],
    config: Config,
    *,
    dp_size: int,
    version: int,
    replaced: Sequence[int] = (),
    reused: Sequence[int] = (),
) -> StepPlan:
    """Shape rewards, filter groups, split the rest by groups into mini-batches, and balance each by tokens over DP.

    `version`: of the weights about to be updated. A group with at least two usable samples is dropped if its oldest
    token would exceed the staleness bound at the last update of the step. `replaced`: ids of groups without signal that
    rollout replaced before this batch; they count as filtered. `reused`: ids of groups of the batch that an earlier
    step has trained and settled; they are trained like the others. Raises ValueError if a sample or a group appears
    twice, and ReuseError if one of `reused` cannot be trained.
    """
    pace = pace_of(config)
    _check_replaced(tags, refill_groups(config), replaced)
    _check_reused(tags, config.admission.max_uses, reused)
    oldest = version + pace.updates_per_step - 1 - pace.max_staleness
    groups = [
        list(group)
        for _, group in itertools.groupby(
            sorted(tags, key=lambda tag: (tag.group_id, tag.sample_index, tag.part)), key=lambda tag: tag.group_id
        )
    ]
    # A group with too few usable samples has failed on the rollout side already, however old its tokens are.
    usable = [alive_samples(group) for group in groups]
    in_time = [len(alive) < 2 or _oldest_version(alive, otherwise=version) >= oldest for alive in usable]
    stale = list(itertools.compress(groups, [not each for each in in_time]))
    fresh, limits = list(itertools.compress(groups, in_time)), response_limits(config)
    own_limits = [limits[group[0].dataset] for group in fresh] if limits else None
    shaped = shape_batch(fresh, shaping_of(config), advantage_of(config.algorithm), own_limits)
    by_key = {tag.key: tag for tag in tags}
    _check_all_trained(reused, {group[0].group_id for group in shaped.groups}, stale)
    mini_batches = []
    for chunk in _chunks(shaped.groups, config.trainer.mini_batches):
        rows = [row for group in chunk for row in group]
        parts = assign_to_ranks([row.total_tokens for row in rows], dp_size)
        mini_batches.append([[rows[i].key for i in part] for part in parts])
    outcome = GroupOutcome(
        trained=shaped.trained_groups - len(reused),
        filtered=shaped.filtered_groups + len(replaced),
        dropped_stale=len(stale),
        failed=shaped.failed_groups,
        reused=len(reused),
    )
    stale_keys = [tag.key for group in stale for tag in group]
    return StepPlan(by_key, shaped, mini_batches, outcome, version, stale_keys, frozenset(reused), frozenset(replaced))


def _oldest_version(samples: Sequence[Sequence[SampleTag]], *, otherwise: int) -> int:
    """Return the version of the oldest token; `otherwise` for demonstrations, which no weights have made."""
    versions = (tag.oldest_version for rows in samples for tag in rows if not tag.demonstrated)
    return min(versions, default=otherwise)


def _check_replaced(tags: Sequence[SampleTag], limit: int, replaced: Sequence[int]) -> None:
    """Check the rollout side's report of replaced groups. Raises ValueError for ids that cannot be right."""
    twice = set(replaced) & {tag.group_id for tag in tags}
    if twice or len(set(replaced)) != len(replaced):
        raise ValueError(f"groups were reported as replaced that are in the batch or were reported twice: {replaced}")
    if len(replaced) > limit:
        raise ValueError(f"{len(replaced)} groups were replaced before a step; admission.refill allows {limit}")


def _check_reused(tags: Sequence[SampleTag], max_uses: int, reused: Sequence[int]) -> None:
    """Check the rollout side's report of groups that are used again. Raises ReuseError for ids that cannot be right."""
    missing = set(reused) - {tag.group_id for tag in tags}
    if missing or len(set(reused)) != len(reused):
        raise ReuseError(f"groups were reported as used again that are not in the batch or appear twice: {reused}")
    if reused and max_uses == 1:
        raise ReuseError(f"groups {list(reused)} were reported as used again, but admission.max_uses is 1")


def _check_all_trained(reused: Sequence[int], trained: Set[int], stale: Sequence[Sequence[SampleTag]]) -> None:
    """Raise ReuseError unless the step trains all groups that are used again, as an earlier step did."""
    if lost := sorted(set(reused) - trained):
        too_old = lost[0] in {group[0].group_id for group in stale}
        ended = "is too old for this step" if too_old else "has no signal or too few usable samples"
        raise ReuseError(f"group {lost[0]} was trained by an earlier step and is to be trained again, but {ended}")


def _chunks(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split `items` into at most `parts` contiguous runs of nearly equal size, none empty."""
    parts = min(parts, len(items))
    bounds = [len(items) * part // parts for part in range(parts + 1)] if parts else []
    return [list(items[start:end]) for start, end in itertools.pairwise(bounds)]


# The prompt groups that a step has trained, counted by the samples that its backward passes have gone through.
#
# The rollout side settles groups by the plan of a step. The trainer counts what it really trained, which reveals an
# update that leaves out a group or trains one twice.


class CountersDiffer(RuntimeError):  # noqa: N818
    """The trainer trained or counted other groups than the rollout side, which counts by the plans of the steps."""


def check_trained(plan: StepPlan, keys: Iterable[str]) -> set[int]:
    """Return the ids of the groups of the samples `keys`: those of all replicas, each as often as it was trained.

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
    return {plan.tags[key].group_id for key in times}


def _groups(plan: StepPlan, times: Mapping[str, int], planned: Mapping[str, int]) -> int:
    """Return how many groups were trained with all their samples, each as often as it was."""
    rows: dict[int, list[int]] = defaultdict(list)
    for key in {**planned, **times}:
        if key in plan.tags:
            rows[plan.tags[key].group_id].append(times.get(key, 0))
    return sum(map(min, rows.values()))
