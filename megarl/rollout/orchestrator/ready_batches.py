"""Batches that the trainer may take: from finished groups to keys and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.counters import Counters, Taken


@dataclass(frozen=True)
class BatchReady:
    """A batch that the trainer may take: its new `groups`, and `keys` of all its rows, failed ones too, in order.

    `timings`: declared `rollout/*` and `reward/errors` metrics of this batch. `replaced`: ids of the groups without
    signal that were replaced before it, which the step counts as filtered. `reused`: ids of the batch's other groups,
    which earlier steps have trained.

    A new controller goes on with the batch from `taken`, what admission has recorded of it, and from `rewards`, the
    mean reward of each group for the curriculum (empty without one). `rebuilds`: how often controller and queue had
    been started anew when it was taken; the trainer's client fills it in.
    """

    step: int
    keys: list[str]
    counters: Counters
    timings: dict[str, float]
    groups: list[int]
    replaced: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    taken: Taken = field(default_factory=lambda: Taken([], [], []))
    rewards: dict[int, float | None] = field(default_factory=dict)
    rebuilds: int = 0


@dataclass(frozen=True)
class PublicationNeeded:
    """The answer to a trainer that waits for rollout, if all replicas are lost and only a publication replaces them."""

    reason: str


class ReadyBatches:
    """The batches that were taken from admission and are not committed."""

    def __init__(self, keys: Callable[[int], Sequence[str]]) -> None:
        """`keys`: returns those of the rows that a finished group has in the queue."""
        self._keys = keys
        self._batches: dict[int, BatchReady] = {}

    def get(self, step: int) -> BatchReady | None:
        """Return the batch of a step if it has been taken."""
        return self._batches.get(step)

    def hold(self, batch: BatchReady) -> None:
        """Go on with a batch that the trainer has taken from another controller."""
        self._batches[batch.step] = batch

    def take(
        self, step: int, admission: Admission, metrics: Mapping[str, float],
        rewards: Callable[[Sequence[int]], dict[int, float | None]] = lambda groups: {},
    ) -> BatchReady:  # fmt: skip
        """Take the batch of a step, whose groups must be ready. `metrics`: what was measured of it.

        `rewards`: returns those of groups, for the curriculum.
        """
        taken = admission.batch(step)
        if taken is None:
            raise ValueError(f"the groups of step {step} are not ready")
        counters, groups, replaced = admission.counters, sorted(taken[0] + taken[1]), admission.replaced(step)
        reused = admission.reused(step)
        shares: dict[str, float] = {}
        if admission.refill:
            finished = len(replaced) + len(groups)
            shares = {
                "rollout/groups_replaced": len(replaced),
                "rollout/groups_replaced_share": len(replaced) / finished,
            }
        if admission.max_uses > 1:
            shares["rollout/groups_reusable"] = counters.reusable
        batch = BatchReady(
            step=step,
            keys=[key for group in sorted(groups + reused) for key in self._keys(group)],
            counters=counters,
            timings={
                **metrics,
                **shares,
                "rollout/queue_depth": counters.ready,
                "total/groups_rolled_back": counters.rolled_back,
            },
            groups=groups,
            replaced=replaced,
            reused=reused,
            taken=admission.taken(step),
            rewards=rewards([*groups, *replaced]),
        )
        self._batches[step] = batch
        return batch

    def pop(self, step: int) -> BatchReady:
        """Return the batch of a step, which is committed."""
        return self._batches.pop(step)

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()
