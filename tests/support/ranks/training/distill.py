"""Steps of one rank of a test world with teachers that it holds, or with demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megarl.queue.trajectory import Trajectory
from megarl.run.step.plan import plan_step
from megarl.run.step.step import train_step
from megarl.telemetry.metrics.declarations import step_metrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from tests.support.ranks.training.policy import exported_gradients, policy_under


def stepped(model_dir: Path, layout: dict[str, Any], rows: list[Trajectory], **changes: Any) -> dict[str, Any]:
    """The streams of this rank's samples in the update, the gradients, and the step's metrics."""
    with policy_under(model_dir, layout, **changes) as policy:
        streams: dict[str, dict[str, torch.Tensor]] = {}
        gradients: list[dict[str, torch.Tensor]] = []
        update, step = policy.update, policy.optimizer.step

        def recorded(samples: list[TrainSample], *args: Any, **options: Any) -> dict[str, float]:
            streams.update({sample.key: dict(sample.streams) for sample in samples})
            return update(samples, *args, **options)

        def recorded_step() -> Any:
            gradients.append(exported_gradients(policy))
            return step()

        by_key, metrics = {row.key: row for row in rows}, step_metrics()
        plan = plan_step([row.tag for row in rows], policy.config, dp_size=parallel.dp_size(), version=0)
        with mock.patch.object(policy, "update", recorded), mock.patch.object(policy.optimizer, "step", recorded_step):
            train_step(policy, plan, by_key, policy.config, PhaseTimer(), metrics, step=0)
        return {
            "streams": streams,
            "gradients": gradients[0],
            "metrics": metrics.reduce(),
            "passes": {name: len(each.chunks) for name, each in policy.teachers.items()},
        }
