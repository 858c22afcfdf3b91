"""A loss that is made of a per-token stream which only the tests declare."""

from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.objective.objective import LossInputs, MicroBatchLoss
from megarl.algorithms.objective.stats import LossStats
from megarl.queue.trajectory import Trajectory
from megarl.trainer.batch import TrainSample
from tests.support.ranks.training.policy import exported_gradients, own_share, policy_under
from tests.support.rollout.declared_streams import WEIGHT, declared


def weighted_likelihood(inputs: LossInputs) -> MicroBatchLoss:
    """Minus the sum of weight times log-prob over the trained tokens, by the global count of tokens."""
    stats = LossStats.zeros(inputs.logprobs_R.device)
    terms_R = inputs.streams[WEIGHT.name] * inputs.logprobs_R
    loss = -torch.where(inputs.mask_R, terms_R, 0.0).sum() / inputs.counts.rl.tokens
    stats.sums["loss"] = loss.detach().double()
    stats.sums["tokens"] = inputs.mask_R.sum(dtype=torch.float64)
    return MicroBatchLoss(loss, stats)


def gradients_of_weighted_likelihood(
    model_dir: Path, rows: list[Trajectory], layout: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    """Loss and gradients of `weighted_likelihood` of trajectories, split over the replicas of a layout."""
    with declared(), policy_under(model_dir, layout, loss=weighted_likelihood, **changes) as policy:
        samples = [TrainSample.of(row) for row in rows]
        _, mine = own_share(samples)
        loss = policy.compute_gradients(mine)["loss"]
        return {"loss": loss, "gradients": exported_gradients(policy)}
