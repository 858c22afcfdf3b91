"""The batch of one step, as every trainer rank has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.queue.trajectory import SampleTag


@dataclass(frozen=True)
class StepBatch:
    """Holds keys and tags of all samples of a step, failed ones included, in (group, sample) order.

    `version`: the version of the weights that the step updates; `timings`: the controller's declared metrics of the
    batch; `replaced`: ids of the groups without signal that rollout replaced before it; `reused`: ids of the groups of
    the batch that an earlier step has trained; `rebuilds`: how often the pool had started another queue before the one
    that has its rows.
    """

    step: int
    version: int
    keys: list[str]
    tags: list[SampleTag]
    timings: dict[str, float]
    replaced: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    rebuilds: int = 0

    @property
    def new_keys(self) -> list[str]:
        """The keys of the samples that no earlier step has trained."""
        return [tag.key for tag in self.tags if tag.group_id not in set(self.reused)] if self.reused else self.keys

    @property
    def replicas_are_lost(self) -> bool:
        """True if replicas were lost that only a publication of the weights replaces."""
        return self.timings.get("rollout/replicas_lost", 0.0) > 0
