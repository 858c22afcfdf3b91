"""megarl's packed losses against an independent padded implementation and against TRL's own loss method.

Values and gradients.
"""

import dataclasses

import pytest
import torch

from megarl.algorithms.correction.apply import CorrectionSpec
from tests.support.losses.loss_batches import Batch, Result, loss_spec, packed_result, random_batch
from tests.support.losses.padded_loss import reference_result
from tests.support.losses.trl_loss import LOSS_TYPES, trl_result

AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length")
TIS = CorrectionSpec("token_tis", cap=1.5)
VARIANTS = {
    "plain": loss_spec(),
    "clip-higher": loss_spec(clip_low=0.1, clip_high=0.3),
    "dual": loss_spec(clip_low=0.2, clip_high=0.28, clip_dual=1.5),
    "kl": loss_spec(kl_coef=0.3),
    "entropy": loss_spec(entropy_coef=0.2),
    "gspo": loss_spec(kind="gspo", clip_low=0.05, clip_high=0.1),
    "gspo-all": loss_spec(kind="gspo", clip_low=0.1, clip_high=0.2, clip_dual=1.3, kl_coef=0.1, entropy_coef=0.05),
    "all": loss_spec(clip_low=0.15, clip_high=0.25, clip_dual=1.4, kl_coef=0.2, entropy_coef=0.1),
    "tis": loss_spec(clip_low=0.1, clip_high=0.3, kl_coef=0.2, correction=TIS),
    "gspo-tis": loss_spec(kind="gspo", clip_low=0.1, clip_high=0.2, kl_coef=0.2, correction=TIS),
}
SEEDS = (0, 1, 2)


def assert_same(ours: Result, theirs: Result, entropy: bool = True) -> None:
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-9, abs=1e-12)
    for mine, other in zip(ours.gradient, theirs.gradient, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    for mine, other in zip(ours.entropy_gradient, theirs.entropy_gradient, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def batches(variant: str) -> list[Batch]:
    # GSPO's mean ratio is closer to 1: more spread, so that both sides of its clip are met.
    return [random_batch(seed, spread=1.0 if "gspo" in variant else 0.5) for seed in SEEDS]


@pytest.mark.parametrize("aggregation_name", AGGREGATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_padded_reference(variant: str, aggregation_name: str) -> None:
    spec = dataclasses.replace(VARIANTS[variant], aggregation=aggregation_name)
    for batch in batches(variant):
        assert_same(packed_result(batch, spec), reference_result(batch, spec))


@pytest.mark.parametrize("estimator", ("k1", "k2"))
def test_other_kl_estimators_equal_the_padded_reference(estimator: str) -> None:
    spec = loss_spec(kl_coef=0.4, kl_estimator=estimator)  # type: ignore[arg-type]
    batch = random_batch(3)
    assert_same(packed_result(batch, spec), reference_result(batch, spec))


def test_every_branch_is_met() -> None:
    """The comparison above would prove little if no ratio were ever clipped."""
    for variant in ("dual", "gspo-all", "all"):
        stats = [packed_result(batch, VARIANTS[variant]).stats.means() for batch in batches(variant)]
        for branch in ("clip_low", "clip_high", "clip_dual"):
            assert sum(s[branch] for s in stats) > 0, (variant, branch)
        assert all(s["clip_fraction"] < 1 for s in stats)
    for batch in batches("tis"):
        assert 0 < packed_result(batch, VARIANTS["tis"]).stats.correction_means()["weight_capped"] < 1


# TRL's sequence ratio has no gradient per token: there, a token's weight reaches the whole sequence's gradient.
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "gspo-tis"])
def test_equals_trl(variant: str, loss_type: str) -> None:
    spec = dataclasses.replace(VARIANTS[variant], aggregation=LOSS_TYPES[loss_type])  # type: ignore[arg-type]
    if spec.entropy_coef and spec.aggregation != "token_mean":
        # TRL averages the entropy over tokens whatever the loss type; ours carries the loss's own weights.
        spec = dataclasses.replace(spec, entropy_coef=0.0)
    for batch in batches(variant):
        theirs = trl_result(batch, spec, loss_type)
        ours = packed_result(batch, spec)
        assert_same(ours, theirs)
        means = ours.stats.means()
        if spec.kind == "ppo":  # under a sequence-level ratio TRL counts sequences, we count tokens
            assert means["clip_low"] == pytest.approx(theirs.metrics["clip_ratio/low_mean"])
            if spec.clip_dual is None:  # TRL judges the ratio after it was cut by delta
                assert means["clip_high"] == pytest.approx(theirs.metrics["clip_ratio/high_mean"])
        assert means["entropy"] == pytest.approx(theirs.metrics["entropy"])
        if spec.kl_coef:
            assert means["kl_ref"] == pytest.approx(theirs.metrics["kl"])
