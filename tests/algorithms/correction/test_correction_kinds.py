"""Every weight and mask: values that verl gave, properties, exact statistics, and what counts where one averages."""

import dataclasses
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.correction.apply import (
    CorrectionSpec,
    TokenWeights,
    importance_weights,
    interpolation,
    loglinear,
)
from megarl.algorithms.correction.config import MaskConfig, MaskKind, WeightKind
from megarl.algorithms.objective.objective import LossInputs, TermCounts, micro_batch_loss
from tests.support.losses.correction_batch import VERL, tensor
from tests.support.losses.loss_batches import Batch, cu_seqlens, loss_spec, packed_result, random_batch

# From verl 0.9.1, fp64, on VERL: two sequences of four tokens, the last one masked.
VERL_WEIGHTS = {
    CorrectionSpec("sequence_tis", cap=1.8): [1.8] * 4 + [math.exp(-20.0)] * 3 + [0.0],
    CorrectionSpec("icepop", low=0.5, high=2.0): [1.0, 0.0, 0.0, 1.9999056411060796, 0.0, 0.0, 1.6487212707001282, 0.0],
    CorrectionSpec("sequence_mis", low=0.3, high=3.0): [1.9999056411060796] * 4 + [0.0] * 4,
}
VERL_ESS = {"sequence_tis": 0.5714285827048577, "icepop": 0.3999926045821127, "sequence_mis": 0.5714285806127168}
# low, high (of the ratio p / q; verl's are of q / p where it calls the mask k1), and the tokens that verl keeps.
VERL_KEPT: dict[MaskKind, tuple[float | None, float, str]] = {
    "token": (0.5, 2.5, "10010010"),
    "sequence": (0.3, 3.0, "11110000"),
    "geometric": (0.3, 3.0, "11110000"),
    "token_k1": (0.6, 2.5, "10000010"),
    "token_k2": (None, 0.4, "10010010"),
    "token_k3": (None, 0.5, "10110010"),
    "seq_sum_k1": (0.4, 3.0, "11110000"),
    "seq_sum_k2": (None, 2.0, "11110000"),
    "seq_sum_k3": (None, 2.0, "11110000"),
    "seq_mean_k1": (0.5, 2.0, "11110000"),
    "seq_mean_k2": (None, 0.4, "11110000"),
    "seq_mean_k3": (None, 0.5, "11110000"),
    "seq_max_k2": (None, 0.6, "11110000"),
    "seq_max_k3": (None, 0.8, "11110000"),
}
EVERY_WEIGHT = [CorrectionSpec(kind) for kind in get_args(WeightKind)]
EVERY_MASK = [MaskConfig(kind=kind, high=1.2) for kind in get_args(MaskKind)]
EVERY = EVERY_WEIGHT + [CorrectionSpec("token_tis", masks=(mask,)) for mask in EVERY_MASK]


def corrected(batch: Batch, spec: CorrectionSpec) -> TokenWeights:
    old_R, rollout_R, mask_R = (torch.cat(getattr(batch, name)) for name in ("old", "rollout", "mask"))
    return importance_weights(old_R, rollout_R, mask_R, spec, cu_seqlens=cu_seqlens(batch.lengths))


@pytest.mark.parametrize("spec", VERL_WEIGHTS, ids=lambda spec: spec.kind)
def test_weights_are_those_of_verl(spec: CorrectionSpec) -> None:
    assert corrected(VERL, spec).weights_R.tolist() == pytest.approx(VERL_WEIGHTS[spec], rel=1e-12)
    means = packed_result(VERL, loss_spec(correction=spec)).stats.correction_means()
    assert means["weight_ess"] == pytest.approx(VERL_ESS[spec.kind], rel=1e-6)  # its metrics are fp32


@pytest.mark.parametrize("kind", get_args(MaskKind))
def test_masks_are_those_of_verl(kind: MaskKind) -> None:
    low, high, kept = VERL_KEPT[kind]
    weights = corrected(VERL, CorrectionSpec("none", masks=(MaskConfig(kind=kind, low=low, high=high),)))
    assert "".join("1" if weight else "0" for weight in weights.weights_R.tolist()) == kept
    assert "1" in kept and "0" in kept[:7]


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: f"{spec.kind}-{'-'.join(m.kind for m in spec.masks)}")
def test_policies_that_agree_are_left_alone(spec: CorrectionSpec) -> None:
    batch = random_batch(1)
    batch.rollout = [values.clone() for values in batch.old]
    weights = corrected(batch, spec)
    assert torch.equal(weights.weights_R, torch.cat(batch.mask).double())
    assert not weights.capped_R.any() and not weights.dropped_R.any()


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: f"{spec.kind}-{'-'.join(m.kind for m in spec.masks)}")
def test_what_stands_at_masked_tokens_is_ignored(spec: CorrectionSpec) -> None:
    batch = random_batch(2)
    expected = corrected(batch, spec)
    nan = float("nan")
    damaged = dataclasses.replace(
        batch,
        old=[torch.where(m, v, nan) for m, v in zip(batch.mask, batch.old, strict=True)],
        rollout=[torch.where(m, v, -nan) for m, v in zip(batch.mask, batch.rollout, strict=True)],
    )
    got = corrected(damaged, spec)
    assert torch.equal(got.weights_R, expected.weights_R) and torch.equal(got.dropped_R, expected.dropped_R)
    assert [float(each.largest) for each in got.rejections] == [float(each.largest) for each in expected.rejections]


SPECS = st.builds(
    CorrectionSpec,
    st.sampled_from(get_args(WeightKind)),
    cap=st.floats(1.0, 3.0),
    low=st.floats(0.2, 1.0),
    high=st.floats(1.0, 4.0),
    masks=st.lists(
        st.builds(MaskConfig, kind=st.sampled_from(get_args(MaskKind)), high=st.floats(1.0, 3.0)),
        max_size=3,
        unique_by=lambda mask: mask.kind,
    ).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), SPECS, st.integers(0, 2**20))
def test_statistics_and_loss_do_not_depend_on_how_a_batch_is_split(seed: int, spec: CorrectionSpec, order: int) -> None:
    batch = random_batch(seed)
    sequences = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(order)).tolist()
    whole = packed_result(batch, loss_spec(correction=spec))
    split = packed_result(batch, loss_spec(correction=spec), split=[sequences[:2], [], sequences[2:]])
    assert split.loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
    ours, theirs = whole.stats.correction_means(), split.stats.correction_means()
    assert {k: v for k, v in theirs.items() if v == v} == pytest.approx(
        {k: v for k, v in ours.items() if v == v}, rel=1e-9
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), SPECS)
def test_statistics_are_those_of_the_coefficients(seed: int, spec: CorrectionSpec) -> None:
    batch = random_batch(seed)
    weights = corrected(batch, spec)
    means = packed_result(batch, loss_spec(correction=spec)).stats.correction_means()
    rows = [row[mask] for row, mask in zip(weights.weights_R.split(batch.lengths), batch.mask, strict=True)]
    every = torch.cat(rows)
    assert means["weight_mean"] == pytest.approx(float(every.mean()))
    assert means["weight_max"] == float(every.max())
    assert means["weight_dropped"] == pytest.approx(float((every == 0).double().mean()))
    assert means["sequences_touched"] == pytest.approx(sum(bool((row == 0).any()) for row in rows) / len(rows))
    assert means["sequences_dropped"] == pytest.approx(sum(bool((row == 0).all()) for row in rows) / len(rows))
    assert means["weight_ess"] == pytest.approx(ess(every))
    assert means["sequence_ess"] == pytest.approx(ess(torch.stack([row.mean() for row in rows])))
    assert not (weights.capped_R & weights.dropped_R).any()


def ess(weights: torch.Tensor) -> float:
    squared = float(weights.square().sum())
    return float(weights.sum()) ** 2 / (len(weights) * squared) if squared else 0.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_a_token_that_is_masked_inside_the_loss_counts(aggregation: str) -> None:
    """The gradient of what is kept is the same with and without the masks; only that of masked tokens is gone."""
    batch = random_batch(3)
    masks = (MaskConfig(kind="token", high=1.5), MaskConfig(kind="seq_max_k2", high=0.9))
    spec = CorrectionSpec("token_tis")
    options = {"aggregation": aggregation, "kl_coef": 0.0}
    plain = packed_result(batch, loss_spec(correction=spec, **options))
    masked = packed_result(batch, loss_spec(correction=dataclasses.replace(spec, masks=masks), **options))
    dropped = corrected(batch, dataclasses.replace(spec, masks=masks)).dropped_R
    assert 0 < int(dropped.sum()) < int(torch.cat(batch.mask).sum())
    expected = torch.where(dropped, torch.zeros(()), torch.cat(plain.gradient))
    torch.testing.assert_close(torch.cat(masked.gradient), expected)


def test_a_mask_leaves_the_kl_and_the_entropy_alone() -> None:
    batch = random_batch(4)
    spec = loss_spec(correction=CorrectionSpec("none", masks=(MaskConfig(kind="token_k2", high=1e-9),)))
    spec = dataclasses.replace(spec, kl_coef=0.3, entropy_coef=0.1)
    nothing = dataclasses.replace(batch, advantages=[0.0] * len(batch.advantages))
    masked = packed_result(batch, spec)
    assert masked.loss == pytest.approx(packed_result(nothing, spec).loss)
    assert sum(float(each.abs().sum()) for each in masked.entropy_gradient) > 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_interpolation_goes_from_the_sampling_to_the_current_policy(lags: list[int], updates: int) -> None:
    alpha_R = interpolation(lags, updates)
    assert bool(((alpha_R >= 0) & (alpha_R <= 1)).all())
    if updates == 0:
        assert alpha_R.tolist() == [1.0] * len(lags)
    current_R, sampling_R = torch.full((len(lags),), -0.3), torch.full((len(lags),), -1.7)
    proximal_R = loglinear(current_R, sampling_R, alpha_R)
    assert bool(((proximal_R >= -1.7) & (proximal_R <= -0.3)).all())
    for lag, value in zip(lags, proximal_R.tolist(), strict=True):
        if updates == 0 or lag == 0:
            assert value == float((current_R if updates == 0 else sampling_R)[0])


def test_the_interpolated_policy_has_no_gradient_and_is_the_current_one_in_a_first_update() -> None:
    batch = random_batch(5)
    new_R = torch.cat(batch.logprobs).requires_grad_()
    advantages_R = tensor(*batch.advantages).repeat_interleave(torch.tensor(batch.lengths))
    streams = {"rollout_logprobs": torch.cat(batch.rollout), "advantages": advantages_R}

    def gradient(proximal: str, **more: torch.Tensor) -> torch.Tensor:
        spec = loss_spec(correction=CorrectionSpec("token_tis", proximal=proximal))  # type: ignore[arg-type]
        inputs = LossInputs(
            new_R,
            torch.cat(batch.mask),
            cu_seqlens(batch.lengths),
            TermCounts.without_streams(batch.counts()),
            streams | more,
        )
        (found,) = torch.autograd.grad(micro_batch_loss(spec.objective, inputs).loss, new_R)
        return found

    first = gradient("loglinear", proximal_alpha=interpolation([3] * len(new_R), 0))
    assert torch.equal(first, gradient("trainer"))
    later = gradient("loglinear", proximal_alpha=interpolation([3] * len(new_R), 2))
    old_R = torch.cat(batch.rollout) + 0.6 * (new_R.detach() - torch.cat(batch.rollout))
    torch.testing.assert_close(later, gradient("trainer", old_logprobs=old_R), rtol=1e-6, atol=1e-9)
