"""Exact values and properties of the packed losses."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.algorithms.interface.segments import sequence_ids
from megarl.algorithms.interface.token_loss import TokenInputs, TokenLoss
from megarl.algorithms.losses import LOSSES
from megarl.algorithms.objective.objective import LossInputs, TermCounts, kl_penalty, micro_batch_loss
from megarl.algorithms.objective.stats import LossStats
from tests.support.losses.loss_batches import (
    Batch,
    LossSpec,
    cu_seqlens,
    loss_spec,
    packed_result,
    random_batch,
)

COUNTS = TermCounts.without_streams(random_batch(0).counts())
SPECS = st.builds(
    LossSpec,
    kind=st.sampled_from(("ppo", "gspo")),
    clip_low=st.floats(0.0, 0.5),
    clip_high=st.floats(0.0, 0.5),
    clip_dual=st.none() | st.floats(1.1, 3.0),
    kl_coef=st.sampled_from((0.0, 0.3)),
    kl_estimator=st.sampled_from(("k1", "k2", "k3")),
    entropy_coef=st.sampled_from((0.0, 0.1)),
    aggregation=st.sampled_from(("token_mean", "sequence_mean", "constant_length")),
    correction=st.none() | st.builds(CorrectionSpec, st.just("token_tis"), st.floats(1.0, 3.0)),
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbers(stats: LossStats) -> dict[str, float]:
    """All means but the correlations, which are NaN for too few tokens."""
    return {key: value for key, value in (stats.means() | stats.correction_means()).items() if "pearson" not in key}


def token_loss(
    name: str, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **options: Any
) -> TokenLoss:
    """A loss of the tokens of one sequence."""
    return LOSSES.find(name).choose(options)(TokenInputs.of(new, old, advantages, mask, cu_seqlens([len(mask)])))


def loss_of(ratio: float, advantage: float, **options: float | None) -> float:
    """PPO's loss of one token with the given importance ratio."""
    return float(
        token_loss("ppo", tensor(math.log(ratio)), tensor(0.0), tensor(advantage), tensor(1.0), **options).loss_R
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.6),  # cut at 1.3
        (0.5, 2.0, -1.0),  # a small ratio of a good token is not cut
        (1.5, -2.0, 3.0),  # nor a large one of a bad token
        (0.5, -2.0, 1.6),  # cut at 0.8
        (5.0, -2.0, 6.0),  # dual: at most 3 |A|
        (5.0, 2.0, -2.6),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, expected: float) -> None:
    assert loss_of(ratio, advantage, clip_low=0.2, clip_high=0.3, clip_dual=3.0) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ("k1", "k3"))
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    """Their expectation over a whole categorical distribution is its KL, and k2's is not."""
    policy = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0)
    other = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(0)
    exact = float((policy.exp() * (policy - other)).sum())
    estimates = kl_penalty(policy, other, estimator)  # type: ignore[arg-type]
    assert float((policy.exp() * estimates).sum()) == pytest.approx(exact, rel=1e-12)
    assert float((policy.exp() * kl_penalty(policy, other, "k2")).sum()) != pytest.approx(exact, rel=1e-2)


@st.composite
def batch_and_split(draw: st.DrawFn) -> tuple[Batch, list[list[int]]]:
    """A ragged batch, some sequences empty or fully masked, and any partition of its sequences."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=7))
    batch = random_batch(draw(st.integers(0, 2**20)), [max(n, 1) for n in lengths])
    for index, length in enumerate(lengths):
        for values in (batch.logprobs, batch.old, batch.rollout, batch.reference, batch.entropy, batch.mask):
            values[index] = values[index][:length]  # an empty sequence is legal
    for mask in batch.mask:
        if draw(st.integers(0, 4)) == 0:
            mask[:] = False
    parts = draw(st.integers(1, 4))
    owner = [draw(st.integers(0, parts - 1)) for _ in lengths]
    return batch, [[i for i, part in enumerate(owner) if part == p] for p in range(parts)]


@settings(max_examples=120, deadline=None)
@given(batch_and_split(), SPECS)
def test_any_split_into_micro_batches_gives_the_same(case: tuple[Batch, list[list[int]]], spec: LossSpec) -> None:
    """Loss, gradients and statistics do not depend on the micro-batches, empty ones and any order included."""
    batch, split = case
    whole, parts = packed_result(batch, spec), packed_result(batch, spec, split)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
    for one, other in zip(whole.gradient + whole.entropy_gradient, parts.gradient + parts.entropy_gradient):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert numbers(parts.stats) == pytest.approx(numbers(whole.stats), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), SPECS)
def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_advantage(seed: int, spec: LossSpec) -> None:
    batch = random_batch(seed)
    batch.old = [t.clone() for t in batch.logprobs]
    spec = loss_spec(kind=spec.kind, clip_low=0.2, clip_high=0.2, aggregation="token_mean")
    result = packed_result(batch, spec)
    tokens = batch.counts().tokens
    means = result.stats.means()
    assert means["ratio"] == means["ratio_max"] == means["ess"] == 1.0
    assert means["approx_kl"] == means["clip_fraction"] == means["logprob_abs_diff_max"] == 0.0
    for gradient, mask, advantage in zip(result.gradient, batch.mask, batch.advantages, strict=True):
        torch.testing.assert_close(gradient, -advantage * mask.double() / tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), SPECS)
def test_masked_tokens_reach_nothing(seed: int, spec: LossSpec) -> None:
    """NaN and infinity in masked positions change no value, gradient or statistic."""
    clean, dirty = random_batch(seed), random_batch(seed)
    for values in (dirty.logprobs, dirty.old, dirty.rollout, dirty.reference, dirty.entropy):
        for each, mask in zip(values, dirty.mask, strict=True):
            each[~mask] = torch.tensor([math.nan, math.inf, -9999.0], dtype=torch.float64)[
                torch.arange(int((~mask).sum())) % 3
            ]
    one, other = packed_result(clean, spec), packed_result(dirty, spec)
    assert other.loss == one.loss
    for a, b in zip(one.gradient + one.entropy_gradient, other.gradient + other.entropy_gradient):
        assert torch.equal(a, b)
    assert numbers(other.stats) == numbers(one.stats)


def test_huge_ratios_stay_finite() -> None:
    for kind in ("ppo", "gspo"):
        new = torch.zeros(2, requires_grad=True)
        inputs = LossInputs(
            new,
            torch.ones(2),
            cu_seqlens([1, 1]),
            COUNTS,
            {
                "old_logprobs": torch.full((2,), -500.0),
                "advantages": torch.tensor([1.0, -1.0]),
                "reference_logprobs": torch.tensor([400.0, -400.0]),
            },
        )
        result = micro_batch_loss(loss_spec(kind=kind, kl_coef=1.0).objective, inputs)
        result.loss.backward()
        assert torch.isfinite(result.loss) and torch.isfinite(new.grad).all()
        assert all(math.isfinite(value) for value in numbers(result.stats).values())


def test_bf16_inputs_are_computed_in_fp32() -> None:
    new = torch.full((1,), -1.0, dtype=torch.bfloat16)
    result = token_loss("ppo", new, new.float() - 1e-3, torch.ones(1), torch.ones(1))
    assert result.loss_R.dtype == torch.float32
    assert float(result.loss_R) == pytest.approx(-math.exp(1e-3), rel=1e-6)


def test_an_empty_micro_batch_weighs_nothing_and_has_a_gradient() -> None:
    empty = torch.zeros(0, requires_grad=True)
    streams = dict.fromkeys(("old_logprobs", "advantages", "reference_logprobs"), empty.detach())
    inputs = LossInputs(empty, empty.detach(), cu_seqlens([]), COUNTS, streams, empty)
    result = micro_batch_loss(loss_spec(kl_coef=0.1, entropy_coef=0.1).objective, inputs)
    result.loss.backward()
    assert float(result.loss) == 0.0
    assert all(float(value) == 0.0 for value in result.stats.sums.values())


def test_missing_inputs_and_wrong_shapes_are_errors() -> None:
    one = torch.zeros(1)
    inputs = LossInputs(one, one, cu_seqlens([1]), COUNTS, {"old_logprobs": one, "advantages": one})
    with pytest.raises(ValueError, match="no reference log-probs"):
        micro_batch_loss(loss_spec(kl_coef=0.1).objective, inputs)
    with pytest.raises(ValueError, match="no entropy"):
        micro_batch_loss(loss_spec(entropy_coef=0.1).objective, inputs)
    with pytest.raises(ValueError, match="equal length"):
        token_loss("ppo", one, one, torch.zeros(2), one)
    with pytest.raises(ValueError, match="covers 2 tokens"):
        sequence_ids(cu_seqlens([2]), 1)


def test_statistics_survive_the_trip_through_vectors() -> None:
    stats = packed_result(random_batch(5), loss_spec(kl_coef=0.1)).stats
    again = LossStats.from_vectors(stats.sum_vector(), stats.max_vector())
    assert numbers(again) == numbers(stats)
    doubled = LossStats.merge([stats, again]).means()
    assert doubled["tokens"] == 2 * stats.means()["tokens"]
    assert doubled["approx_kl"] == pytest.approx(stats.means()["approx_kl"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 5))
def test_correlation_of_two_log_probs_over_any_split(seed: int, parts: int) -> None:
    batch = random_batch(seed)
    masked = [torch.where(m, t, torch.nan) for t, m in zip(batch.old, batch.mask, strict=True)]
    stats = LossStats.merge(
        LossStats.of_pair(
            torch.cat([torch.zeros(0), *masked[p::parts]]),
            torch.cat([torch.zeros(0), *batch.logprobs[p::parts]]),
            torch.cat([torch.zeros(0).bool(), *batch.mask[p::parts]]),
            cu_seqlens([len(m) for m in batch.mask[p::parts]]),
        )
        for p in range(parts)
    )
    old, new = (torch.cat([t[m] for t, m in zip(v, batch.mask, strict=True)]) for v in (batch.old, batch.logprobs))
    means = stats.means()
    assert means["pearson"] == pytest.approx(float(torch.corrcoef(torch.stack([old, new]))[0, 1]), rel=1e-6)
    assert means["logprob_abs_diff"] == pytest.approx(float((old - new).abs().mean()))
    assert means["logprob_abs_diff_max"] == pytest.approx(float((old - new).abs().max()))
    loss_stats = packed_result(batch, loss_spec()).stats.means()
    assert loss_stats["pearson"] == pytest.approx(means["pearson"], rel=1e-6)


def test_correlation_of_what_does_not_vary_is_undefined() -> None:
    constant, cuts = torch.full((1000,), -0.1), cu_seqlens([1000])
    varying = -torch.rand(1000, generator=torch.Generator().manual_seed(0))
    keep = torch.ones(1000).bool()
    assert math.isnan(LossStats.of_pair(constant, varying, keep, cuts).means()["pearson"])
    assert LossStats.of_pair(varying, varying, keep, cuts).means()["pearson"] == pytest.approx(1.0)
    assert math.isnan(LossStats.zeros().means()["pearson"])
