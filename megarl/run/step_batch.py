"""One step's batch as every trainer rank knows it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.queue.trajectory import SampleTag


@dataclass(frozen=True)
class StepBatch:
    """Keys and tags of all samples of a step, failed ones included, in (group, sample) order.

    `version`: that of the weights which the step updates; `timings`: the controller's declared metrics of the batch.
    """

    step: int
    version: int
    keys: list[str]
    tags: list[SampleTag]
    timings: dict[str, float]
