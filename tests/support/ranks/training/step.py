"""One step on given trajectories, and what the updates of one rank saw of it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megarl.queue.trajectory import Trajectory
from megarl.run.step.plan import plan_step
from megarl.run.step.step import train_step
from megarl.telemetry.metrics.declarations import step_metrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.trainer import logprobs, parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.logprobs import linear_token_logprobs
from megarl.trainer.policy import Policy
from tests.support.ranks.training.policy import exported, exported_gradients, policy_under


def take_step(
    policy: Policy, rows: list[Trajectory], see: Callable[[list[TrainSample]], object], version: int = 0
) -> dict[str, Any]:
    """Train one step on the rows; return the first update's gradients, the metrics and the weights after the step.

    `see`: gets the samples of each update before it is made.
    """
    gradients: list[dict[str, torch.Tensor]] = []
    update, step = policy.update, policy.optimizer.step

    def seen_update(samples: list[TrainSample], *args: Any, **options: Any) -> dict[str, float]:
        see(samples)
        return update(samples, *args, **options)

    def recorded_step() -> Any:
        if not gradients:
            gradients.append(exported_gradients(policy))
        return step()

    policy.update, policy.optimizer.step = seen_update, recorded_step
    by_key, metrics = {row.key: row for row in rows}, step_metrics()
    plan = plan_step([row.tag for row in rows], policy.config, dp_size=parallel.dp_size(), version=version)
    train_step(policy, plan, by_key, policy.config, PhaseTimer(), metrics, step=0)
    return {"gradients": gradients[0] if gradients else {}, "metrics": metrics.reduce(), "weights": exported(policy)}


def stepped(model_dir: Path, rows: list[Trajectory], **changes: Any) -> dict[str, Any]:
    """What `take_step` returns, and (advantage, trained tokens) of each update's samples on this rank.

    The advantage is NaN where the tokens of a sample have several; `by_token`: those of each token.
    `entropy`: whether each update has reported it; `computed`: whether its passes over the logits have computed it.
    """
    with policy_under(model_dir, {}, **changes) as policy:
        updates: list[dict[str, tuple[float, int]]] = []
        by_token: dict[str, list[float]] = {}
        reported: list[bool] = []
        computed: list[bool] = []
        asked: set[bool] = set()
        update = policy.update

        def see(samples: list[TrainSample]) -> None:
            tokens = {sample.key: sample.streams["advantages"].tolist() for sample in samples}
            by_token.update(tokens)
            one = {key: values[0] if len(set(values)) == 1 else math.nan for key, values in tokens.items()}
            updates.append({sample.key: (one[sample.key], sample.trained_tokens) for sample in samples})

        def watched_update(*args: Any, **options: Any) -> dict[str, float]:
            with mock.patch.object(logprobs, "linear_token_logprobs", watched):
                values = update(*args, **options)
            reported.append("entropy" in values)
            [with_entropy] = asked
            asked.clear()
            computed.append(with_entropy)
            return values

        def watched(*args: Any, with_entropy: bool, **options: Any) -> Any:
            asked.add(with_entropy)
            return linear_token_logprobs(*args, with_entropy=with_entropy, **options)

        policy.update = watched_update
        found = take_step(policy, rows, see)
        return found | {"updates": updates, "by_token": by_token, "entropy": reported, "computed": computed}
