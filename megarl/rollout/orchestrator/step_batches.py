"""The batch of each step: taken with its measurements when its groups are ready, and settled by its commit."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict, Unpack

from megarl.common.errors import BatchNotReady, RolloutError
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.counters import Counters, StepGroups
from megarl.rollout.agents.batch_stats import BusyClock, TrajectoryTimes
from megarl.rollout.agents.loop_run import RunningGroups
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.orchestrator.prompt_groups import PromptGroups
from megarl.rollout.tasks.prompts import PromptSource
from megarl.rollout.transport.background import BackgroundTasks
from megarl.rollout.workers.worker_pool import WorkerPool
from megarl.telemetry.trace import events


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


def record_batch_taken(batch: BatchReady, slow: Sequence[TrajectoryTimes], *, in_flight: int) -> None:
    """Record the events of a batch that the trainer takes now. `slow`: the slowest samples since the batch before."""
    step, now, unix = batch.step + 1, time.monotonic(), time.time()
    events.record("batch_taken", now, step=step, args={"groups": len(batch.groups), "in_flight": in_flight})
    for each in slow:
        end = now - max(0.0, unix - each.ended)  # another host's clock may be ahead
        events.record(
            "slow_trajectory", end - each.seconds, end, step=step, group=each.group, sample=each.sample,
            replica=each.replica, args={"cause": each.cause, **each.args()},
        )  # fmt: skip


class StepEnds(TypedDict):
    """How many groups of a step ended in each way; see `Admission.commit`."""

    trained: int
    filtered: int
    dropped_stale: int
    failed: int
    reused: NotRequired[int]
    trained_groups: NotRequired[Sequence[int] | None]
    ended: NotRequired[Mapping[str, Sequence[int]] | None]


class StepBatches:
    """Takes the batches of the current history from admission and commits them.

    `needed`: the step whose batch the trainer waits for with nothing else to do, or the last such one.
    """

    def __init__(
        self,
        groups: PromptGroups,
        running: RunningGroups,
        source: PromptSource,
        fleet: EnginePool,
        engine_time: BusyClock,
        workers: WorkerPool | None = None,
    ) -> None:
        """`engine_time`: the clock of calls to engines. `workers`: run the loops, if there are any."""
        self._groups, self._running, self._source = groups, running, source
        self._fleet, self._engine_time, self._workers = fleet, engine_time, workers
        self._batches: dict[int, BatchReady] = {}  # not yet committed
        self._taken_at: float | None = None  # when the batch before was taken
        self.needed = -1

    def hold(self, batch: BatchReady) -> None:
        """Continue with a batch that the trainer took from an earlier controller."""
        self._batches[batch.step] = batch

    async def wait(
        self, step: int, timeout_s: float, tasks: BackgroundTasks, needs_publication: Callable[[], str],
        working: Callable[[], str],
    ) -> BatchReady | PublicationNeeded:  # fmt: skip
        """Return the batch of `step`; see `RolloutController.wait_batch`.

        `needs_publication()`: why the trainer must publish its weights now. `working()`: what rewards and agent workers
        work on.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            tasks.check()
            if (batch := self._batches.get(step) or self.take(step)) is not None:
                return batch
            if reason := needs_publication():
                return PublicationNeeded(reason)
            try:
                await tasks.await_change(deadline - time.monotonic())
            except TimeoutError:
                raise self._not_ready(step, timeout_s, working()) from None

    def _not_ready(self, step: int, waited_s: float, working: str) -> BatchNotReady:
        admission = self._groups.admission
        groups, replaced = sorted(admission.in_flight), admission.counters.replaced
        refilled = f", {replaced} groups without signal replaced (admission.refill)" if replaced else ""
        return BatchNotReady(
            f"the trainer waited {waited_s:.0f} s for the batch of step {step}; groups in flight: "
            f"{len(groups)} {groups[:8]}{refilled}, replicas alive: {self._fleet.serving}{working}"
        )

    def take(self, step: int) -> BatchReady | None:
        """Take the batch of `step` if its groups are ready. Only the `needed` one is filled up with reused groups."""
        admission = self._groups.admission
        if admission.batch(step, needed=step == self.needed) is None:
            return None
        self._groups.free_rows()  # of groups that are too old for later steps
        stats, now = self._running.take_stats(), time.monotonic()
        stats.engine_seconds = self._engine_time.take(now)
        stats.interval, self._taken_at = now - self._taken_at if self._taken_at is not None else None, now
        fleet = self._fleet
        metrics = stats.metrics(
            replicas_serving=len(fleet.serving), replicas_lost=len(fleet.lost),
            replicas_idle=len(fleet.idle), load=fleet.take_load(),
        )  # fmt: skip
        metrics |= fleet.take_rates()
        if self._workers is not None:
            metrics |= self._workers.take_metrics()
        batch = ready_batch(step, admission, self._groups.queued, metrics, self._source.rewards)
        self._batches[step] = batch
        record_batch_taken(batch, stats.slowest, in_flight=len(admission.in_flight))
        return batch

    async def commit(self, step: int, **ends: Unpack[StepEnds]) -> None:
        """Settle the groups of `step`, free the rows that are not reused, and start the groups that fit then.

        Raises ValueError if the numbers or ids do not account for every group once, and RolloutError if another trainer
        has begun meanwhile.
        """
        admission = self._groups.admission
        admission.commit(step, **ends)
        batch = self._batches.pop(step)
        self._groups.free_rows()

        def next_group() -> int:
            self._groups.check_present(admission, f"the commit of step {step}")
            return admission.next_group

        def first_open() -> int:
            return min(admission.unsettled, default=admission.next_group)

        await self._source.commit(sorted(batch.groups + batch.replaced), step + 1, next_group, first_open)
        counters = admission.counters
        if not counters.balanced:
            raise RolloutError(f"group counters do not add up after step {step}: {counters}")
        self._groups.start()

    def drop(self) -> None:
        """Forget all batches and measurements, because a trainer starts again."""
        self._batches.clear()
        self._running.take_stats()
        if self._workers is not None:
            self._workers.take_metrics()
        self._taken_at, self.needed = None, -1
