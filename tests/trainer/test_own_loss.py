"""A loss of one's own, by its import path, reaches the policy's gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import plain_gradients_of, plain_logprobs
from tests.support.losses.samples import advantage_of
from tests.support.models.tensors import worst

pytestmark = pytest.mark.world

CAP = 0.9
TOPR = {
    "algorithm__loss": "examples.tutorials.own_loss.topr:topr",
    "algorithm__loss_options": {"cap": CAP},
    "algorithm__kl__coef": 0.0,
    "algorithm__entropy_coef": 0.0,
}


def written_out(model: torch.nn.Module, samples: list[TrainSample]) -> torch.Tensor:
    """Minus the mean over tokens of w A log p, w = min(ratio, cap) where A < 0."""
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        assert sample.loss_mask_R is not None
        logprobs, _ = plain_logprobs(model, sample)
        ratio = (logprobs.detach() - sample.streams["old_logprobs"]).exp()
        weight = ratio.clamp(max=CAP) if advantage_of(sample) < 0 else 1.0
        total = total - (weight * advantage_of(sample) * logprobs * sample.loss_mask_R).sum()
        tokens += int(sample.loss_mask_R.sum())
    return total / tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_trains_by_its_own_loss(
    trained: Callable[..., Any],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
    ranks: int,
) -> None:
    got = trained(ranks, "dense", **TOPR)
    model = AutoModelForCausalLM.from_pretrained(model_dir("dense"), dtype=torch.float32)
    loss = written_out(model, samples_of("dense"))
    assert got["metrics"][0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert got["metrics"][0]["clip_high"] > 0
    assert worst(got["gradients"], plain_gradients_of(model, loss)) <= 1e-5
