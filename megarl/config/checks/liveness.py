"""Checks, before anything starts, that trainer and engines cannot wait for each other for ever.

A step always ends, because

1. its groups may start: the weights that are published before it leave room for it within the bound on staleness;
2. its groups fit the queue together;
3. the groups that it waits for end: admission waits only for groups in flight, and generation and rewards have time
   limits;
4. filters cannot hold it back: rollout replaces only so many groups before each step (`admission.refill_limit`), and
   the trainer filters a batch after it is taken;
5. groups that are used again (`admission.max_uses`) cannot either: a step can always do without them, because as many
   new groups may start as it takes, and in the queue they make room for new ones.

The last three hold for every config. The tests of admission visit every state of small runs, and find a state in which
nothing can happen exactly if one of the first two does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.derived.algorithm import filters_equal_rewards
from megarl.config.derived.staleness import capacity_groups
from megarl.config.schema import Config


def fits_queue(groups: int, capacity: int | None) -> bool:
    """Tell whether a step of `groups` groups fits a queue of `capacity` groups (2)."""
    return capacity is None or capacity >= groups


def liveness_problems(config: Config) -> Iterator[str]:
    """Yield what would make the run wait for ever, or filter in rollout what the trainer would train on.

    The first condition is checked with the other numbers of the pace (`pace_problems`).
    """
    groups, samples = config.batch.groups, config.batch.samples_per_group
    if not fits_queue(groups, held := capacity_groups(config)):
        yield (
            f"queue.capacity: {config.queue.capacity} samples hold {held} groups of {samples}, but a step takes "
            f"batch.groups={groups} at once, so trainer and engines would wait for each other; set it to at least "
            f"{groups * samples} or remove it"
        )
    if config.admission.refill and not filters_equal_rewards(config):
        yield (
            "admission.refill: it replaces the groups that algorithm.filter_zero_variance drops, which is off; set "
            "that to true, or refill to false"
        )
