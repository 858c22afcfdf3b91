"""The batches that the trainer may take: from finished groups to keys and metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.counters import Counters, StepGroups


@dataclass(frozen=True)
class BatchReady:
    """A batch that the trainer may take: its new `groups`, and the `keys` of all its rows in order, also failed ones.

    `timings`: the batch's `rollout/*` and `reward/errors` metrics. `replaced`: ids of the groups without signal that
    were replaced before it; the step counts them as filtered. `reused`: ids of the batch's other groups, which earlier
    steps have trained.

    A new controller continues from `taken`, admission's record of the batch, and `rewards`, the mean reward of each
    group for the curriculum (empty without one). `rebuilds`: how often controller and queue had restarted when it was
    taken; the trainer's client sets it.
    """

    step: int
    keys: list[str]
    counters: Counters
    timings: dict[str, float]
    groups: list[int]
    replaced: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    taken: StepGroups = field(default_factory=lambda: StepGroups([], [], []))
    rewards: dict[int, float | None] = field(default_factory=dict)
    rebuilds: int = 0


@dataclass(frozen=True)
class PublicationNeeded:
    """The answer to a trainer that waits while all replicas are lost and only a publication replaces them."""

    reason: str


def ready_batch(
    step: int, admission: Admission, queued: Mapping[int, Sequence[str]], metrics: Mapping[str, float],
    rewards: Callable[[Sequence[int]], dict[int, float | None]] = lambda groups: {},
) -> BatchReady:  # fmt: skip
    """Take the batch of a step, whose groups must be ready, from admission.

    `queued`: the keys of each finished group's rows in the queue. `metrics`: of the batch. `rewards`: returns those of
    groups, for the curriculum.
    """
    if admission.batch(step) is None:
        raise ValueError(f"the groups of step {step} are not ready")
    taken, counters = admission.taken(step), admission.counters
    groups, replaced, reused = sorted(taken.ok + taken.failed), taken.replaced, sorted(taken.reused)
    shares: dict[str, float] = {}
    if admission.refill:
        finished = len(replaced) + len(groups)
        shares = {
            "rollout/groups_replaced": len(replaced),
            "rollout/groups_replaced_share": len(replaced) / finished,
        }
    if admission.max_uses > 1:
        shares["rollout/groups_reusable"] = counters.reusable
    return BatchReady(
        step=step,
        keys=[key for group in sorted(groups + reused) for key in queued[group]],
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
        taken=taken,
        rewards=rewards([*groups, *replaced]),
    )
