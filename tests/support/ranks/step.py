"""One step on given trajectories, and what the updates of one rank saw of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.queue.trajectory import Trajectory
from megarl.run.step import plan_step, train_step
from megarl.telemetry.declarations import step_metrics
from megarl.telemetry.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from tests.support.ranks.policy import exported_gradients, policy_under
from tests.support.samples import advantage_of


def stepped(model_dir: Path, rows: list[Trajectory], **changes: Any) -> dict[str, Any]:
    """(advantage, trained tokens) of each update's samples on this rank, the first update's gradients, metrics."""
    with policy_under(model_dir, {}, **changes) as policy:
        updates: list[dict[str, tuple[float, int]]] = []
        gradients: list[dict[str, torch.Tensor]] = []
        update, step = policy.update, policy.optimizer.step

        def recorded_update(samples: list[TrainSample], counts: Any) -> dict[str, float]:
            updates.append({sample.key: (advantage_of(sample), sample.trained_tokens) for sample in samples})
            return update(samples, counts)

        def recorded_step() -> Any:
            if not gradients:
                gradients.append(exported_gradients(policy))
            return step()

        policy.update, policy.optimizer.step = recorded_update, recorded_step
        by_key, metrics = {row.key: row for row in rows}, step_metrics()
        plan = plan_step([row.tag for row in rows], policy.config, dp_size=parallel.dp_size(), version=0)
        train_step(policy, plan, by_key, policy.config, PhaseTimer(), metrics)
        return {"updates": updates, "gradients": gradients[0], "metrics": metrics.reduce()}
