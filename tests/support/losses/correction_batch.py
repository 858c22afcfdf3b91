"""A batch on which values of verl 0.9.1 were recorded, with ratios on both sides of every bound."""

import torch

from tests.support.losses.loss_batches import Batch


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Two sequences of four tokens; the last token of the second is masked.
VERL = Batch(
    logprobs=[tensor(-0.9, -0.8, -1.5, -0.1), tensor(-1.9, -29.8, 0.1, 0.3)],
    old=[tensor(-1.0, -0.5, -2.0, -0.1), tensor(-1.5, -30.0, -0.25, -0.7)],
    rollout=[tensor(-1.0, -1.5, -1.0, -0.7931), tensor(-2.5, -1.0, -0.75, -9.0)],
    reference=[torch.zeros(4), torch.zeros(4)],
    entropy=[tensor(0, 0, 0, 0), tensor(0, 0, 0, 0)],
    mask=[torch.tensor([True] * 4), torch.tensor([True, True, True, False])],
    advantages=[0.7, -1.2],
)
