"""The weights of a correction: exact values, bounds, and the gradient that they leave."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.correction.apply import CorrectionSpec, importance_weights
from megarl.algorithms.objective.objective import GlobalCounts, LossInputs, MicroBatchLoss, TermCounts, micro_batch_loss
from megarl.algorithms.objective.stats import LossStats
from tests.support.losses.correction_batch import VERL, tensor
from tests.support.losses.loss_batches import Batch, cu_seqlens, loss_spec, packed_result, random_batch

TIS = CorrectionSpec("token_tis", cap=2.0)
LOGPROB = st.floats(-200.0, 0.0)


# From verl 0.9.1 on the batch VERL, fp64: `compute_rollout_correction_weights` with rollout_is "token",
# rollout_is_threshold 2.0, and `get_policy_loss_fn("vanilla")` with these `rollout_is_weights`, "token-mean", clip
# ratios 0.2 and 0.28, c = 3.
VERL_WEIGHTS = [1.0, 2.0, 0.36787944117144233, 1.9999056411060796, 2.0, 2.061153622438558e-09, 1.6487212707001282, 0.0]
VERL_MEANS = {"weight_mean": 1.2880723345940115, "weight_ess": 0.7325892247701438, "weight_capped": 0.2857142853061225}
VERL_LOSS = 0.16960816366585166
VERL_GRADIENT = [
    [-0.11051709180756474, -0.14816364413634356, 0.0, -0.19999056411060795],
    [0.0, 4.3157120904656195e-10, 0.401082317473027, 0.0],
]


def test_equals_verl() -> None:
    spec = loss_spec(clip_low=0.2, clip_high=0.28, clip_dual=3.0, correction=TIS)
    result = packed_result(VERL, spec)
    weights = importance_weights(
        torch.cat(VERL.old), torch.cat(VERL.rollout), torch.cat(VERL.mask), TIS, cu_seqlens=cu_seqlens([4, 4])
    )
    assert weights.weights_R.tolist() == pytest.approx(VERL_WEIGHTS, rel=1e-12)
    means = result.stats.correction_means()
    assert {name: means[name] for name in VERL_MEANS} == pytest.approx(VERL_MEANS, rel=1e-6)  # its metrics are fp32
    assert result.loss == pytest.approx(VERL_LOSS, rel=1e-12)
    assert [row.tolist() for row in result.gradient] == [pytest.approx(row, rel=1e-9) for row in VERL_GRADIENT]


@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.booleans()), max_size=8), st.floats(1.0, 10.0))
def test_weights_are_the_ratio_up_to_the_cap(tokens: list[tuple[float, float, bool]], cap: float) -> None:
    old_R, rollout_R = tensor(*(t[0] for t in tokens)), tensor(*(t[1] for t in tokens))
    keep_R = torch.tensor([t[2] for t in tokens], dtype=torch.bool)
    got = importance_weights(
        old_R, rollout_R, keep_R, CorrectionSpec("token_tis", cap), cu_seqlens=cu_seqlens([len(keep_R)])
    )
    for (old, rollout, kept), weight, capped in zip(tokens, got.weights_R.tolist(), got.capped_R.tolist(), strict=True):
        ratio = math.exp(max(old - rollout, -20.0))
        assert weight == (pytest.approx(min(ratio, cap), rel=1e-12) if kept else 0.0)
        assert not kept or 0.0 < weight <= cap
        assert capped == (kept and min(ratio, math.exp(20.0)) > cap)


def corrected(batch: Batch, kind: str, *, clip: float = 0.2) -> tuple[MicroBatchLoss, torch.Tensor]:
    """The loss of a first update, whose samples have no old log-probs, and its gradient."""
    new_R = torch.cat(batch.logprobs).requires_grad_()
    lengths = batch.lengths
    advantages_R = tensor(*batch.advantages).repeat_interleave(torch.tensor(lengths))
    spec = loss_spec(kind=kind, clip_low=clip, clip_high=clip, correction=TIS)
    streams = {"rollout_logprobs": torch.cat(batch.rollout), "advantages": advantages_R}
    counts = TermCounts.without_streams(batch.counts())
    inputs = LossInputs(new_R, torch.cat(batch.mask), cu_seqlens(lengths), counts, streams)
    result = micro_batch_loss(spec.objective, inputs)
    (gradient_R,) = torch.autograd.grad(result.loss, new_R)
    return result, gradient_R


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from(("ppo", "gspo")), st.sampled_from((0.0, 0.2)))
def test_the_gradient_of_a_first_update_is_weighted_reinforce(seed: int, kind: str, clip: float) -> None:
    batch = random_batch(seed)
    batch.rollout = [t + 0.6 * torch.randn_like(t) for t in batch.logprobs]
    result, gradient_R = corrected(batch, kind, clip=clip)
    tokens, start = batch.counts().tokens, 0
    loss = 0.0
    for new, rollout, mask, advantage in zip(batch.logprobs, batch.rollout, batch.mask, batch.advantages, strict=True):
        weight = (new.exp() / rollout.exp()).clamp(max=2.0) * mask
        torch.testing.assert_close(gradient_R[start : start + len(new)], -advantage * weight / tokens)
        loss -= float((advantage * weight).sum()) / tokens
        start += len(new)
    assert float(result.loss) == pytest.approx(loss)
    means = result.stats.means()
    assert means["ratio"] == means["ratio_max"] == means["ess"] == 1.0
    assert means["approx_kl"] == means["clip_fraction"] == 0.0


def test_statistics_compare_the_sampling_policy_with_the_proximal_one() -> None:
    """They are those that an update without a correction reports, whose old log-probs are the engine's."""
    batch = random_batch(7)
    result, _ = corrected(batch, "ppo")
    expected = packed_result(dataclasses.replace(batch, old=batch.rollout), loss_spec()).stats.means()
    got = result.stats.correction_means()
    for name in ("ratio", "ess", "approx_kl", "logprob_abs_diff", "logprob_abs_diff_max", "pearson", "tokens"):
        assert got[f"sampling_{name}"] == pytest.approx(expected[name], rel=1e-9), name


def test_no_tokens_have_weights_of_full_effect() -> None:
    means = LossStats.zeros().correction_means()
    assert (means["weight_mean"], means["weight_capped"], means["weight_ess"]) == (0.0, 0.0, 1.0)


def test_a_correction_needs_the_log_probs_of_the_policy_that_sampled() -> None:
    one = torch.zeros(1)
    streams = {"old_logprobs": one, "advantages": one}
    inputs = LossInputs(one, one, cu_seqlens([1]), TermCounts.without_streams(GlobalCounts(1, 1, 1)), streams)
    with pytest.raises(KeyError, match="rollout_logprobs"):
        micro_batch_loss(loss_spec(correction=TIS).objective, inputs)
    with pytest.raises(KeyError, match="old_logprobs"):  # without a correction nothing takes their place
        micro_batch_loss(loss_spec().objective, dataclasses.replace(inputs, streams={"advantages": one}))


def test_bf16_log_probs_give_fp32_weights() -> None:
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    got = importance_weights(half, half.float() - 1e-3, torch.tensor([True]), TIS, cu_seqlens=cu_seqlens([1])).weights_R
    assert got.dtype == torch.float32 and float(got) == pytest.approx(math.exp(1e-3), rel=1e-6)
