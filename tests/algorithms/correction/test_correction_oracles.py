"""Corrections against verl's and AReaL's own functions on the same tensors.

Differences in definition, each of them compared with the option that makes it equal:

- verl bounds k1 by exp(k1) = q / p, the masks `token`, `sequence` and `geometric` by p / q.
- AReaL's kl_k1 is log(p / q), and its kl_k3 has p and q exchanged.
- AReaL's sequence weight is the geometric mean; only its masks of sequences are compared.
- AReaL computes weights in fp32. It counts masked tokens where it averages; verl does not.
- AReaL's proximal policy is always one version before the current one.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from megarl.algorithms.correction import apply
from megarl.algorithms.correction.apply import CorrectionSpec, interpolation
from megarl.algorithms.correction.config import MaskConfig, MaskKind
from megarl.algorithms.objective.objective import LossInputs, TermCounts, micro_batch_loss
from tests.support.losses import correction_oracles as oracles
from tests.support.losses.loss_batches import Batch, cu_seqlens, loss_spec, packed_result, random_batch

pytestmark = pytest.mark.oracle

SEEDS = (0, 1, 2)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
# Bounds at which each mask leaves out some tokens of each batch, and keeps some; without symmetry where there are two.
BOUNDS: dict[MaskKind, tuple[float | None, float]] = {
    "token": (0.6, 1.4),
    "sequence": (0.3, 2.5),
    "geometric": (0.8, 1.3),
    "token_k1": (0.5, 1.5),
    "token_k2": (None, 0.3),
    "token_k3": (None, 0.2),
    "seq_sum_k1": (0.3, 2.5),
    "seq_sum_k2": (None, 0.8),
    "seq_sum_k3": (None, 0.8),
    "seq_mean_k1": (0.7, 1.2),
    "seq_mean_k2": (None, 0.2),
    "seq_mean_k3": (None, 0.2),
    "seq_max_k2": (None, 0.6),
    "seq_max_k3": (None, 0.5),
}
WEIGHTS = {
    "token_tis": CorrectionSpec("token_tis", cap=1.3),
    "sequence_tis": CorrectionSpec("sequence_tis", cap=1.5),
    "icepop": CorrectionSpec("icepop", low=0.6, high=1.4),
    "sequence_mis": CorrectionSpec("sequence_mis", low=0.4, high=2.5),
}


def mask_of(kind: MaskKind) -> MaskConfig:
    low, high = BOUNDS[kind]
    return MaskConfig(kind=kind, low=low, high=high)


def batch_of(seed: int) -> Batch:
    """One with tokens on which the policies are e^25 apart, alongside those that the weights are for."""
    batch = random_batch(seed, lengths=(5, 1, 9, 3, 16, 2, 7, 4, 6))
    batch.rollout[2][:2] = batch.old[2][:2] - torch.tensor([25.0, -25.0], dtype=torch.float64)
    batch.mask[2][:2] = True
    return batch


def corrected(batch: Batch, spec: CorrectionSpec) -> apply.TokenWeights:
    return apply.importance_weights(
        torch.cat(batch.old),
        torch.cat(batch.rollout),
        torch.cat(batch.mask),
        spec,
        cu_seqlens=cu_seqlens(batch.lengths),
    )


def same_weights(batch: Batch, spec: CorrectionSpec) -> None:
    ours, theirs = corrected(batch, spec), oracles.verl_corrected(batch, spec)
    torch.testing.assert_close(ours.weights_R, torch.cat(theirs.weights), rtol=1e-12, atol=0.0)
    means = packed_result(batch, loss_spec(correction=spec)).stats.correction_means()
    assert means["weight_mean"] == pytest.approx(theirs.metrics["rollout_is_mean"], rel=1e-6)
    assert means["weight_ess"] == pytest.approx(theirs.metrics["rollout_is_eff_sample_size"], rel=1e-5)
    if spec.kind == "token_tis":
        assert means["weight_max"] == theirs.metrics["rollout_is_max"]
        assert means["weight_capped"] == pytest.approx(theirs.metrics["rollout_is_ratio_fraction_high"], rel=1e-6)
    if spec.kind == "sequence_tis":
        high = theirs.metrics["rollout_is_ratio_fraction_high"]  # of sequences
        assert means["sequences_capped"] == pytest.approx(high, rel=1e-6)
    if spec.kind in ("icepop", "sequence_mis"):
        assert means["weight_dropped"] == pytest.approx(theirs.metrics["rollout_is_oob_ratio"], rel=1e-6)


def same_masks(batch: Batch, kinds: tuple[MaskKind, ...]) -> None:
    spec = CorrectionSpec("none", masks=tuple(mask_of(kind) for kind in kinds))
    ours, theirs = corrected(batch, spec), oracles.verl_corrected(batch, spec)
    assert torch.equal(ours.weights_R > 0, torch.cat(theirs.kept))
    means = packed_result(batch, loss_spec(correction=spec)).stats.correction_means()
    for kind in kinds:
        name = f"rollout_rs_{oracles.VERL_MASKS.get(kind, kind)}"
        assert means[f"rejected_{kind}"] == pytest.approx(theirs.metrics[f"{name}_masked_fraction"], rel=1e-6)
        if not kind.endswith("k1") and kind not in oracles.VERL_MASKS:
            assert means[f"largest_{kind}"] == pytest.approx(theirs.metrics[f"{name}_max"], rel=1e-6)
    assert means["weight_dropped"] == pytest.approx(theirs.metrics["rollout_rs_masked_fraction"], rel=1e-6)
    assert means["sequences_touched"] == pytest.approx(theirs.metrics["rollout_rs_seq_masked_fraction"], rel=1e-6)


def same_loss_as_verl(batch: Batch, spec: CorrectionSpec) -> None:
    """With the denominator of each: all trained tokens, or those that are kept."""
    theirs = oracles.verl_corrected(batch, spec)
    trained = batch.counts().tokens
    loss, gradient = oracles.verl_loss(batch, theirs, **CLIP, mode="token-mean", tokens=trained)
    ours = packed_result(batch, loss_spec(**CLIP, correction=spec))
    assert_close(ours.loss, ours.gradient, loss, gradient)
    kept = dataclasses.replace(batch, mask=[row & batch.mask[i] for i, row in enumerate(theirs.kept)])
    tokens = kept.counts().tokens
    assert 0 < tokens < trained
    loss, gradient = oracles.verl_loss(batch, theirs, **CLIP, mode="token-mean", tokens=tokens)
    # What `reject_before_updates` does: the masks are out of the samples, and the weights are of what is left.
    weight = dataclasses.replace(spec, masks=())
    if not spec.kind.startswith("sequence"):  # a sequence's weight is of what is left, verl's of all its tokens
        ours = packed_result(kept, loss_spec(**CLIP, correction=weight))
        assert_close(ours.loss, ours.gradient, loss, gradient)


def assert_close(loss: float, gradient: list[torch.Tensor], their_loss: float, their_gradient: Any, **by: Any) -> None:
    assert loss == pytest.approx(their_loss, rel=by.get("rtol", 1e-9), abs=by.get("atol", 1e-12))
    for mine, other in zip(gradient, their_gradient, strict=True):
        torch.testing.assert_close(mine, other, **({"rtol": 1e-9, "atol": 1e-12} | by))


FP32 = {"rtol": 1e-5, "atol": 1e-7}
RATIO = {"metric": "ratio"}


def exchanged(batch: Batch) -> Batch:
    return dataclasses.replace(batch, old=batch.rollout, rollout=batch.old)


def areal_cases() -> Iterator[tuple[CorrectionSpec, dict[str, Any], bool]]:
    """Our correction, AReaL's options, and whether the weights of what is kept are the same too."""
    yield WEIGHTS["token_tis"], {"level": "token", "action": "clamp", "upper": 1.3, **RATIO}, True
    yield WEIGHTS["icepop"], {"level": "token", "action": "mask", "lower": 0.6, "upper": 1.4, **RATIO}, True
    uncapped = CorrectionSpec("token_tis", cap=1e12)
    for kind, level, agg, metric in (
        ("sequence", "sequence", "sum", "ratio"),
        ("geometric", "sequence", "mean", "ratio"),
        ("token_k2", "token", "mean", "kl_k2"),
        ("seq_sum_k2", "sequence", "sum", "kl_k2"),
        ("seq_mean_k2", "sequence", "mean", "kl_k2"),
        ("seq_max_k2", "sequence", "max", "kl_k2"),
    ):
        mask = mask_of(kind)  # type: ignore[arg-type]
        options = {"level": level, "agg": agg, "metric": metric, "lower": mask.low, "upper": mask.high}
        yield dataclasses.replace(uncapped, masks=(mask,)), options, metric != "ratio"
    for kind, level, agg in (
        ("token", "token", "mean"),
        ("sequence", "sequence", "sum"),
        ("geometric", "sequence", "mean"),
    ):
        mask = mask_of(kind)  # type: ignore[arg-type]
        low, high = math.log(mask.low or 0.0), math.log(mask.high)
        options = {"level": level, "agg": agg, "metric": "kl_k1", "lower": low, "upper": high}
        yield dataclasses.replace(uncapped, masks=(mask,)), options, True


def same_as_areal(batch: Batch) -> None:
    for spec, options, weights_too in areal_cases():
        ours, theirs = corrected(batch, spec), oracles.areal_corrected(batch, oracles.areal_options(**options))
        rejected_R = ours.rejected if spec.masks else ours.dropped_R
        assert torch.equal(torch.cat(batch.mask) & ~rejected_R, torch.cat(theirs.kept)), options
        changed_R = ours.capped_R | ours.dropped_R
        share = float(changed_R.sum() / torch.cat(batch.mask).sum())
        assert share == pytest.approx(theirs.metrics["filtered"]), options
        if weights_too:
            torch.testing.assert_close(ours.weights_R.float(), torch.cat(theirs.weights), **FP32)
            loss, gradient = oracles.areal_loss(batch, oracles.areal_options(**options), batch.old, **CLIP)
            result = packed_result(batch, loss_spec(**CLIP, correction=spec))
            assert_close(result.loss, result.gradient, loss, gradient, **FP32)


def same_k3_as_areal(batch: Batch) -> None:
    for kind, level, agg in (
        ("token_k3", "token", "mean"),
        ("seq_mean_k3", "sequence", "mean"),
        ("seq_max_k3", "sequence", "max"),
    ):
        mask = mask_of(kind)  # type: ignore[arg-type]
        options = oracles.areal_options(level=level, agg=agg, metric="kl_k3", upper=mask.high)
        ours = corrected(exchanged(batch), CorrectionSpec("none", masks=(mask,)))
        assert torch.equal(ours.weights_R > 0, torch.cat(oracles.areal_corrected(batch, options).kept))


def same_interpolation(batch: Batch, seed: int) -> None:
    """At one update after the proximal policy, which is where AReaL puts it."""
    generator = torch.Generator().manual_seed(seed)
    current = 9
    versions = [torch.randint(3, current, (n,), generator=generator) for n in batch.lengths]
    versions_R = torch.cat(versions)
    theirs_R = oracles.areal_approximations()(
        torch.cat(batch.rollout), torch.cat(batch.logprobs), versions_R, current, method="loglinear"
    )["loglinear"]
    alpha_R = interpolation((current - 1 - versions_R).tolist(), 1)
    ours_R = apply.loglinear(torch.cat(batch.logprobs), torch.cat(batch.rollout), alpha_R)
    torch.testing.assert_close(ours_R, theirs_R, rtol=1e-6, atol=1e-6)
    spec = dataclasses.replace(WEIGHTS["token_tis"], proximal="loglinear")
    options = oracles.areal_options(level="token", action="clamp", upper=spec.cap, **RATIO)
    loss, gradient = oracles.areal_loss(batch, options, theirs_R.split(batch.lengths), **CLIP)
    leaf_R = torch.cat(batch.logprobs).requires_grad_()
    advantages = torch.tensor(batch.advantages, dtype=torch.float64).repeat_interleave(torch.tensor(batch.lengths))
    streams = {"rollout_logprobs": torch.cat(batch.rollout), "advantages": advantages, "proximal_alpha": alpha_R}
    inputs = LossInputs(
        leaf_R, torch.cat(batch.mask), cu_seqlens(batch.lengths), TermCounts.without_streams(batch.counts()), streams
    )
    result = micro_batch_loss(loss_spec(**CLIP, correction=spec).objective, inputs)
    (got,) = torch.autograd.grad(result.loss, leaf_R)
    assert_close(float(result.loss), list(got.split(batch.lengths)), loss, gradient, **FP32)


COMBINED = [
    dataclasses.replace(WEIGHTS["token_tis"], masks=(mask_of("geometric"),)),
    dataclasses.replace(WEIGHTS["icepop"], masks=(mask_of("seq_mean_k3"), mask_of("token_k2"))),
    dataclasses.replace(WEIGHTS["sequence_tis"], masks=(mask_of("seq_max_k2"),)),
    CorrectionSpec("none", masks=(mask_of("sequence"), mask_of("token_k1"))),
]


def test_everything_agrees_with_verl_and_areal() -> None:
    for seed in SEEDS:
        batch = batch_of(seed)
        for spec in WEIGHTS.values():
            same_weights(batch, spec)
        for kind in get_args(MaskKind):
            same_masks(batch, (kind,))
        for first, second in itertools.pairwise(get_args(MaskKind)):
            if oracles.VERL_MASKS.get(first, first) != oracles.VERL_MASKS.get(second, second):
                same_masks(batch, (first, second))
        for spec in COMBINED:
            same_loss_as_verl(batch, spec)
        mild = random_batch(seed, lengths=(5, 1, 9, 3, 16, 2, 7, 4, 6))
        same_as_areal(mild)
        same_k3_as_areal(mild)
        same_interpolation(mild, seed)


@pytest.mark.parametrize("kind", get_args(MaskKind))
def test_each_mask_leaves_some_tokens_out_and_keeps_some(kind: MaskKind) -> None:
    for seed in SEEDS:
        means = packed_result(
            batch_of(seed), loss_spec(correction=CorrectionSpec("none", masks=(mask_of(kind),)))
        ).stats.correction_means()
        assert 0.02 < means[f"rejected_{kind}"] < 0.98, means[f"rejected_{kind}"]


@pytest.mark.parametrize("kind", WEIGHTS)
def test_each_weight_meets_its_bounds(kind: str) -> None:
    for seed in SEEDS:
        means = packed_result(batch_of(seed), loss_spec(correction=WEIGHTS[kind])).stats.correction_means()
        assert 0.02 < max(means["weight_capped"], means["weight_dropped"]) < 0.98
