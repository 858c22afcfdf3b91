"""Weights that rows bring reach the policy's gradient, under every layout, with counts over all replicas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import CLIP, ENTROPY, KL, plain_gradients_of, plain_logprobs
from tests.support.losses.samples import advantage_of, with_streams
from tests.support.models.tensors import worst

pytestmark = pytest.mark.world

CE = 0.5
CHANGES: dict[str, Any] = {"algorithm__ce": {"coef": CE}, "trainer__micro_batch_tokens": 48}


@pytest.fixture(scope="module")
def weighted(samples_of: Callable[[str], list[TrainSample]]) -> list[TrainSample]:
    """Some samples bring weights of some terms, some none; a demonstration is among them, and inserted tokens."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for number, sample in enumerate(samples_of("dense")):
        size, streams = len(sample.response_ids), {}
        if number % 3 == 0:
            kept = torch.rand(size, generator=generator) > 0.3
            streams["rl_weights"] = torch.rand(size, generator=generator) * kept
        if number % 4 == 1:
            assert sample.loss_mask_R is not None
            streams["ce_weights"] = (~sample.loss_mask_R).float() * 2.0
        if number == 6:  # a demonstration
            streams = {"rl_weights": torch.zeros(size), "ref_kl_weights": torch.zeros(size)}
            streams["ce_weights"] = torch.ones(size)
        found.append(with_streams(sample, **streams))
    return found


def expected(model_dir: Path, samples: list[TrainSample]) -> tuple[float, dict[str, torch.Tensor], dict[str, int]]:
    """Loss, gradients and counts by transformers and plain PyTorch, one unpadded sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    sums = {"rl": torch.zeros(()), "ce": torch.zeros(()), "ref_kl": torch.zeros(())}
    tokens = dict.fromkeys(sums, 0)
    for sample in samples:
        logprobs, entropy = plain_logprobs(model, sample)
        assert sample.loss_mask_R is not None
        mask, one = sample.loss_mask_R.float(), torch.ones(len(sample.response_ids))
        weights = {
            "rl": sample.streams.get("rl_weights", one) * mask,
            "ce": sample.streams.get("ce_weights", 0 * one),
            "ref_kl": sample.streams.get("ref_kl_weights", one) * mask,
        }
        ratio = (logprobs - sample.streams["old_logprobs"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        difference = sample.streams["reference_logprobs"] - logprobs
        advantage = advantage_of(sample)
        losses = {
            "rl": -torch.minimum(ratio * advantage, clipped * advantage) - ENTROPY * entropy,
            "ce": -logprobs,
            "ref_kl": difference.exp() - difference - 1,
        }
        for term, each in weights.items():
            sums[term] = sums[term] + (each * losses[term]).sum()
            tokens[term] += int((each != 0).sum())
    loss = sum(coef * sums[term] / tokens[term] for term, coef in (("rl", 1.0), ("ce", CE), ("ref_kl", KL)))
    return float(loss.detach()), plain_gradients_of(model, loss), tokens  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, id="alone"),
        pytest.param(2, {}, id="dp2"),
        pytest.param(2, {"pipeline": 2}, id="pp2"),
        pytest.param(2, {"tensor": 2, "sequence": True}, id="tp2-sp"),
    ],
)
def test_the_gradient_is_that_of_the_terms_written_out(
    trained: Callable[..., Any],
    model_dir: Callable[[str], Path],
    weighted: list[TrainSample],
    ranks: int,
    layout: dict[str, Any],
) -> None:
    got = trained(ranks, "dense", layout, samples=weighted, **CHANGES)
    loss, gradients, tokens = expected(model_dir("dense"), weighted)
    metrics = got["metrics"][0]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert worst(got["gradients"], gradients) <= 1e-5
    assert {term: metrics[name] for term, name in COUNTS.items()} == tokens


COUNTS = {"rl": "tokens", "ce": "ce_tokens", "ref_kl": "ref_kl_tokens"}


def test_only_one_replica_has_weights(
    trained: Callable[..., Any], samples_of: Callable[[str], list[TrainSample]]
) -> None:
    """The other replica packs and counts them too, by their default."""
    samples = samples_of("dense")
    size = len(samples[0].response_ids)
    samples = [with_streams(samples[0], rl_weights=torch.full((size,), 0.5)), *samples[1:]]
    alone, both = (trained(ranks, "dense", samples=samples) for ranks in (1, 2))
    assert worst(both["gradients"], alone["gradients"]) <= 1e-5
    assert both["metrics"][0]["tokens"] == alone["metrics"][0]["tokens"]
