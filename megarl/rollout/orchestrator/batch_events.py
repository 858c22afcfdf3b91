"""The events of a batch that the trainer takes: the batch itself, and its slowest trajectories."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megarl.rollout.agents.sample_times import TrajectoryTimes
from megarl.rollout.orchestrator.ready_batches import BatchReady
from megarl.telemetry.trace import events


def record_batch_taken(batch: BatchReady, slow: Sequence[TrajectoryTimes], *, in_flight: int) -> None:
    """Record that the trainer takes a batch now. `slow`: of the samples that ended since the batch before."""
    step, now, unix = batch.step + 1, time.monotonic(), time.time()
    events.record("batch_taken", now, step=step, args={"groups": len(batch.groups), "in_flight": in_flight})
    for each in slow:
        end = now - max(0.0, unix - each.ended)  # another host's clock may be ahead
        events.record(
            "slow_trajectory", end - each.seconds, end, step=step, group=each.group, sample=each.sample,
            replica=each.replica, args={"cause": each.cause, **each.args()},
        )  # fmt: skip
