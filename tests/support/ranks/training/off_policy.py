"""One step with a correction, and what its updates saw of it on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.queue.streams import OLD_LOGPROBS, PROXIMAL_ALPHA
from megarl.queue.trajectory import Trajectory
from megarl.run.step.plan import plan_step
from megarl.run.step.step import train_step
from megarl.telemetry.metrics.declarations import step_metrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy
from tests.support.ranks.training.policy import exported, exported_gradients, policy_under


def corrected_step(model_dir: Path, rows: list[Trajectory], version: int = 0, **changes: Any) -> dict[str, Any]:
    """`updates`: of each sample of each update (its loss mask, its alpha or None, whether it has old log-probs).

    Also the first update's gradients, the metrics, the weights after the step, and the number of log-prob passes.
    """
    with policy_under(model_dir, {}, **changes) as policy:
        updates: list[dict[str, tuple[list[bool], list[float] | None, bool]]] = []
        gradients: list[dict[str, torch.Tensor]] = []
        passes: list[int] = []
        _watch(policy, updates, gradients, passes)
        by_key, metrics = {row.key: row for row in rows}, step_metrics()
        plan = plan_step([row.tag for row in rows], policy.config, dp_size=parallel.dp_size(), version=version)
        train_step(policy, plan, by_key, policy.config, PhaseTimer(), metrics, step=0)
        return {
            "updates": updates,
            "gradients": gradients[0] if gradients else {},
            "metrics": metrics.reduce(),
            "weights": exported(policy),
            "passes": len(passes),
        }


def _watch(policy: Policy, updates: list[Any], gradients: list[Any], passes: list[int]) -> None:
    update, step, compute_logprobs = policy.update, policy.optimizer.step, policy.compute_logprobs

    def watched_update(samples: list[TrainSample], counts: Any, **options: Any) -> dict[str, float]:
        updates.append({sample.key: _seen(sample) for sample in samples})
        return update(samples, counts, **options)

    def watched_step() -> Any:
        if not gradients:
            gradients.append(exported_gradients(policy))
        return step()

    def watched_pass(*args: Any, **options: Any) -> Any:
        passes.append(1)
        return compute_logprobs(*args, **options)

    policy.update, policy.optimizer.step, policy.compute_logprobs = watched_update, watched_step, watched_pass


def _seen(sample: TrainSample) -> tuple[list[bool], list[float] | None, bool]:
    alpha_R = sample.streams.get(PROXIMAL_ALPHA)
    assert sample.loss_mask_R is not None
    return (
        sample.loss_mask_R.tolist(),
        None if alpha_R is None else alpha_R.tolist(),
        OLD_LOGPROBS in sample.streams,
    )
