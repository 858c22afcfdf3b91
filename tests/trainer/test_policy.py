"""Log-prob passes, empty micro-batches, MoE balancing, refusals; gradients are in test_layouts.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import dense_dims, plain_logprobs
from tests.support.models.tensors import worst
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.rank_fixtures import OnRanks

pytestmark = pytest.mark.world

SP2 = {"tensor": 2, "sequence": True}
VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
GetModel = Callable[[str], Path]
GetSamples = Callable[[str], list[TrainSample]]


def gathered(ranks: list[Any]) -> dict[int, torch.Tensor]:
    """Merge the log-probs of all ranks by sample; every rank of a replica must hold the same."""
    merged: dict[int, torch.Tensor] = {}
    for result in ranks:
        for index, logprobs in result:
            assert torch.equal(merged.setdefault(index, logprobs), logprobs)
    return merged


@pytest.mark.parametrize(
    ("ranks", "model", "layout"),
    [
        (1, "dense", {}),
        (2, "dense", SP2),
        (2, "dense", {"tensor": 2}),
        (2, "dense", {"pipeline": 2}),
        (2, "tied", VPP2),
        (2, "dense", {}),
        (2, "moe", {"expert": 2}),
    ],
)
def test_logprobs_are_those_of_transformers(
    on_ranks: OnRanks, model_dir: GetModel, samples_of: GetSamples, ranks: int, model: str, layout: dict[str, Any]
) -> None:
    samples = samples_of(model)
    got = gathered(on_ranks(ranks, "training.policy:logprobs", model, layout=layout))
    plain = AutoModelForCausalLM.from_pretrained(model_dir(model), dtype=torch.float32)
    assert sorted(got) == list(range(len(samples)))
    for index, sample in enumerate(samples):
        with torch.no_grad():
            torch.testing.assert_close(got[index], plain_logprobs(plain, sample)[0], atol=2e-5, rtol=0)


def test_the_reference_has_its_own_weights(on_ranks: OnRanks, samples_of: GetSamples, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, "qwen3", seed=9, **dense_dims())
    changes = {"layout": {"pipeline": 2}, "reference": True, "reference__path": other}
    got = gathered(on_ranks(2, "training.policy:logprobs", **changes))
    plain = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    for index, sample in enumerate(samples_of("dense")):
        with torch.no_grad():
            torch.testing.assert_close(got[index], plain_logprobs(plain, sample)[0], atol=2e-5, rtol=0)


def test_without_a_kl_coefficient_there_is_no_reference(on_ranks: OnRanks) -> None:
    got = on_ranks(1, "training.policy:no_reference")
    assert "algorithm.kl.coef is 0" in got[0]


@pytest.mark.parametrize(
    ("ranks", "model", "layout"),
    [
        (2, "dense", VPP2),
        (2, "dense", {}),
        (2, "moe", {"expert": 2}),
        (2, "moe", {"pipeline": 2}),
        (2, "moe", SP2),
        (2, "moe", {"context": 2}),
    ],
)
def test_a_single_sample_leaves_empty_micro_batches_that_weigh_nothing(
    trained: Callable[..., Any], samples_of: GetSamples, ranks: int, model: str, layout: dict[str, Any]
) -> None:
    """The other replica, or the other micro-batch of the pipeline, is empty."""
    alone = samples_of(model)[:1]
    got = trained(ranks, model, layout, samples=alone)
    one = trained(1, model, samples=alone)
    silent = {name for name, value in one["gradients"].items() if not value.any()}
    assert all(not got["gradients"][name].any() for name in silent)  # experts that saw no token
    loud = one["gradients"].keys() - silent
    assert worst({n: got["gradients"][n] for n in loud}, {n: one["gradients"][n] for n in loud}) <= 1e-5
    assert got["metrics"][0]["tokens"] == one["metrics"][0]["tokens"] == alone[0].trained_tokens


BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.01}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, SP2),
        (2, {"expert": 2}),
        (2, {"pipeline": 2}),
        (2, VPP2),
        (2, {"expert": 2, "expert_tensor": 1, **SP2}),
        (2, {"context": 2}),
        pytest.param(4, {"context": 2, "pipeline": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"context": 2, "expert_tensor": 1, **SP2}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, **SP2}, marks=pytest.mark.slow),  # padding on a stage that is not the first
    ],
)
def test_moe_auxiliary_losses_are_scaled_alike_in_every_layout(
    trained: Callable[..., Any], samples_of: GetSamples, ranks: int, layout: dict[str, Any]
) -> None:
    """One sequence per micro-batch (the balance is per micro-batch), with empty ones where replicas have fewer.

    Sequence and context parallelism pad the odd ones.
    """
    assert any(sample.length % 2 for sample in samples_of("moe"))
    options = {"packed": False}
    one = trained(1, "moe", megatron__transformer=BALANCED, **options)
    plain = trained(1, "moe", **options)
    assert worst(one["gradients"], plain["gradients"]) > 1e-2, "the auxiliary losses do nothing"
    got = trained(ranks, "moe", layout, megatron__transformer=BALANCED, **options)
    assert worst(got["gradients"], one["gradients"]) <= 1e-5
    for name in ("aux_loss", "moe_z_loss"):
        assert got["metrics"][0][name] == pytest.approx(one["metrics"][0][name], rel=1e-5)
    together = trained(1, "moe", megatron__transformer=BALANCED)
    assert together["metrics"][0]["moe_z_loss"] == pytest.approx(one["metrics"][0]["moe_z_loss"], rel=1e-5)


def test_a_global_balancing_loss_is_that_of_the_update(trained: Callable[..., Any], samples_of: GetSamples) -> None:
    """All replicas have one; what an earlier update has routed is no part of it."""
    changes = {"megatron__transformer": BALANCED | {"moe_router_load_balancing_type": "global_aux_loss"}}
    changes |= {"trainer__optimizer__lr": 1e-12}
    first, other, *_ = samples_of("moe")
    one = trained(1, "moe", samples=[first], **changes)["metrics"][0]["aux_loss"]
    assert one > 0.5 and trained(2, "moe", samples=[first, first], **changes)["metrics"][0][
        "aux_loss"
    ] == pytest.approx(one)
    both = trained(1, "moe", samples=[first, other], packed=False, steps=2, **changes)["metrics"]
    assert both[0]["aux_loss"] == pytest.approx(both[1]["aux_loss"], rel=1e-5)


def plain_balancing(model_dir: Path, samples: list[TrainSample]) -> dict[str, torch.Tensor]:
    """Gradient of the mean over tokens of each sequence's Switch loss and z-loss, per layer, written out."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        for logits in model(input_ids=ids, output_router_logits=True).router_logits:
            probabilities = logits.softmax(-1)
            tokens, experts = probabilities.shape
            chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
            switch = experts * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
            total = total + tokens * (0.3 * switch + 0.01 * logits.logsumexp(-1).square().mean())
    (total / sum(sample.length for sample in samples)).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and name.endswith("mlp.gate.weight")
    }


def test_moe_auxiliary_losses_are_means_over_tokens(
    trained: Callable[..., Any], model_dir: GetModel, samples_of: GetSamples
) -> None:
    samples = samples_of("moe")
    options = {"packed": False}
    with_losses = trained(1, "moe", megatron__transformer=BALANCED, **options)["gradients"]
    without = trained(1, "moe", **options)["gradients"]
    expected = plain_balancing(model_dir("moe"), samples)
    assert expected
    # Routers of lower layers also feel the losses of the layers above: that is in both.
    assert worst({name: with_losses[name] - without[name] for name in expected}, expected) <= 1e-4


@pytest.mark.parametrize(("layout", "precision"), [({"expert": 2}, "bf16"), (SP2, "fp32"), ({"context": 2}, "fp32")])
def test_expert_bias_counts_real_tokens_only_and_stays_fp32(
    trained: Callable[..., Any], samples_of: GetSamples, layout: dict[str, Any], precision: str
) -> None:
    options = {
        "samples": samples_of("latent")[6:7],
        "packed": False,
        "trainer__precision": precision,
        "megatron__transformer": {
            "moe_router_bias_update_rate": 0.01,
        },
    }
    # Padded under sequence parallelism; expert parallelism's other replica has nothing but padding.
    assert [sample.length for sample in samples_of("latent")[6:7]] == [9]
    one = trained(1, "latent", **options)
    got = trained(2, "latent", layout, **options)
    (load,) = one["expert_load"][0]
    assert load.shape == (3, 8) and torch.equal(load.sum(1), torch.full((3,), 4.0 * 9))
    for other in got["expert_load"]:
        torch.testing.assert_close(other, [load], rtol=0, atol=0)
    for bias in got["expert_bias"]:
        for layer, values in bias.items():
            assert values.dtype == torch.float32
            torch.testing.assert_close(values, one["expert_bias"][0][layer], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("counts", "the replicas hold GlobalCounts"),
        ("no_old", "0:0 has no old_logprobs"),
        ("no_reference", "0:0 has no reference_logprobs"),
        ("no_rollout", "0:0 has no rollout_logprobs"),
        ("no_proximal", "0:0 has no old_logprobs"),
        ("nothing", "no replica holds a trained token"),
        ("no_weight", "no token has a weight in any term of the loss"),
        ("too_long", "micro_batch_tokens=8"),
    ],
)
def test_bad_mini_batches_are_refused(on_ranks: OnRanks, what: str, message: str) -> None:
    got = on_ranks(2, "training.policy:refused", what=what)
    assert all(message in text for text in got), got


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nan_stops_every_rank_before_any_weight_or_the_schedule_changed(on_ranks: OnRanks, what: str) -> None:
    for message, unchanged in on_ranks(2, "training.policy:non_finite", what=what):
        assert "no weight was changed" in message and what in message and unchanged


def test_learning_rate_schedule_counts_updates(on_ranks: OnRanks, samples_of: GetSamples) -> None:
    run = {"layout": {}, "samples": samples_of("dense")[:2], "steps": 4}
    options = {
        "run__steps": 4,
        "trainer__optimizer__warmup_steps": 2,
        "trainer__optimizer__schedule": "linear",
        "trainer__optimizer__min_lr": 1e-4,
    }
    metrics = on_ranks(1, "training.policy:train", **run, **options)[0]["metrics"]
    assert [m["lr"] for m in metrics] == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])
