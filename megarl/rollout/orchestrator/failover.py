"""The record from which a new rollout controller continues when one dies and the trainer lives. Pure.

The trainer's client keeps it with its calls (`TrainerRecord`): the history of the last commit, the batches in training,
and the version that engines serve. Everything else is lost with the controller and the queue, and comes from the
journal or is drawn again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.rollout.admission.counters import Counters
from megarl.rollout.orchestrator.step_batches import BatchReady


@dataclass(frozen=True)
class CommitAnswer:
    """The answer to a commit: the numbers of groups, and the history with which a new controller would begin."""

    counters: Counters
    history: dict[str, Any]


@dataclass(frozen=True)
class Failover:
    """The state with which a new controller begins.

    `history`: of the last commit; None before the first one of a new run. `held`: the batches that all ranks have read
    and the trainer has not committed, by step. `version`: what the engines serve; None before the first publication.
    `base`: the first version published in this history, and the number of steps done by then. `announced`: the version
    of the weight sync that runs, if any. `admits`: whether groups may start. `needed`: the step whose batch the trainer
    waits for, or the last one. `evaluation`: the label of the one alongside training.
    """

    history: dict[str, Any] | None
    held: tuple[BatchReady, ...] = ()
    version: int | None = None
    base: tuple[int, int] | None = None
    announced: int | None = None
    admits: bool = False
    needed: int = -1
    evaluation: str | None = None


@dataclass
class TrainerRecord:
    """Keeps the handover up to date: each method records an answer of the controller. Before `begun` it is empty."""

    now: Failover | None = None
    _taken: dict[int, BatchReady] = field(default_factory=dict)

    def begun(self, history: dict[str, Any] | None) -> None:
        """Begin with a history that the trainer resumes, and forget everything else."""
        self.now, self._taken = Failover(history), {}

    def published(self, version: int, admits: bool) -> None:
        """Record that a weight sync is complete."""
        if self.now is None:
            return
        history = self.now.history
        base = self.now.base or (version, 0 if history is None else int(history["admission"]["steps"]))
        self.note(version=version, base=base, announced=None, admits=admits)

    def taken(self, batch: BatchReady) -> None:
        """Record a batch that the trainer was given and has not read yet."""
        self._taken[batch.step] = batch

    def keep(self, step: int) -> None:
        """Record that all ranks have read the batch of a step and no longer need the queue for it."""
        if self.now is None:
            return
        held = {batch.step: batch for batch in (*self.now.held, self._taken.pop(step))}
        self.note(held=tuple(held[each] for each in sorted(held)))

    def committed(self, step: int, history: dict[str, Any]) -> None:
        """Record the history after the commit of a step."""
        self._taken.pop(step, None)
        if self.now is not None:
            self.note(history=history, held=tuple(batch for batch in self.now.held if batch.step != step))

    def evaluated(self, labels: Sequence[str]) -> None:
        """Record which evaluations have ended."""
        if self.now is not None and self.now.evaluation in labels:
            self.note(evaluation=None)

    def lost(self) -> None:
        """Forget the unread batches: the new controller takes others."""
        self._taken.clear()

    def note(self, **changes: Any) -> None:  # noqa: ANN401  # fields of Failover, each of a type of its own
        """Record changed fields of `Failover`; `announced`: a weight sync is about to begin."""
        if self.now is not None:
            self.now = replace(self.now, **changes)
