"""megarl's packed losses against an independent padded implementation and against TRL's own loss method.

Values, gradients, and that the comparison can fail: each mutation of a rule must break it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from megarl.algorithms import aggregation, losses
from megarl.algorithms.correction import CorrectionSpec
from tests.support.loss_batches import Batch, Result, loss_spec, packed_result, random_batch
from tests.support.padded_loss import reference_result
from tests.support.trl_loss import LOSS_TYPES, trl_result

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


def everything_agrees() -> None:
    for (name, spec), kind in itertools.product(VARIANTS.items(), AGGREGATIONS):
        each = dataclasses.replace(spec, aggregation=kind)
        batch = batches(name)[0]
        assert_same(packed_result(batch, each), reference_result(batch, each))
    for name in ("all", "gspo-all"):
        each = dataclasses.replace(VARIANTS[name], aggregation="token_mean")
        batch = batches(name)[1]
        assert_same(packed_result(batch, each), trl_result(batch, each, "dapo"))


def _ratio_with(change: Callable[..., torch.Tensor]) -> tuple[object, str, Callable[..., torch.Tensor]]:
    original = losses.importance_ratio
    return losses, "importance_ratio", lambda *args: change(original, *args)


def _wrapped(module: object, name: str, change: Callable[..., object]) -> tuple[object, str, Callable[..., object]]:
    original = getattr(module, name)
    return module, name, lambda *args, **kwargs: change(original, *args, **kwargs)


def _bounded_for_every_sign(
    f: Callable[..., losses.TokenLoss],
    lp: torch.Tensor,
    old: torch.Tensor,
    adv: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_dual: float | None,
    **kw: object,
) -> losses.TokenLoss:
    result = f(lp, old, adv, mask, clip_dual=clip_dual, **kw)
    if clip_dual is None:
        return result
    bounded_R = torch.minimum(result.loss_R, -clip_dual * adv)
    return dataclasses.replace(result, loss_R=torch.where(mask.bool(), bounded_R, result.loss_R))


def _weights_with(change: Callable[..., object]) -> tuple[object, str, Callable[..., object]]:
    return _wrapped(losses, "importance_weights", change)


def _current_for_proximal(
    f: Callable[..., losses.TokenLoss], spec: losses.LossSpec, inputs: losses.LossInputs
) -> losses.TokenLoss:
    if spec.correction is None:
        return f(spec, inputs)
    streams = {name: value for name, value in inputs.streams.items() if name != "old_logprobs"}
    return f(spec, dataclasses.replace(inputs, streams=streams))


MUTATIONS = {
    "inverse ratio": lambda: _ratio_with(lambda f, d, m, c, k: f(-d, m, c, k)),
    "sequence ratio is the sum, not the mean": lambda: _ratio_with(
        lambda f, d, m, c, k: f(d * (2.0 if k == "gspo" else 1.0), m, c, k)
    ),
    "sequence mean over masked tokens too": lambda: _ratio_with(lambda f, d, m, c, k: f(d, torch.ones_like(m), c, k)),
    "one sequence ratio for the whole pack": lambda: _ratio_with(
        lambda f, d, m, c, k: f(d, m, torch.stack([c[0], c[-1]]), k)
    ),
    "half of the ratio's gradient": lambda: _ratio_with(
        lambda f, d, m, c, k: (f(d, m, c, k) + f(d, m, c, k).detach()) / 2
    ),
    "clip bounds swapped": lambda: _wrapped(
        losses,
        "policy_loss",
        lambda f, *a, clip_low, clip_high, **kw: f(*a, clip_low=clip_high, clip_high=clip_low, **kw),
    ),
    "dual clip for every sign": lambda: _wrapped(losses, "policy_loss", _bounded_for_every_sign),
    "no dual clip": lambda: _wrapped(losses, "policy_loss", lambda f, *a, clip_dual, **kw: f(*a, clip_dual=None, **kw)),
    "mask ignored": lambda: _wrapped(
        losses,
        "policy_loss",
        lambda f, lp, old, adv, mask, **kw: f(lp, old, adv, torch.ones_like(mask), **kw),
    ),
    "advantage's sign": lambda: _wrapped(
        losses, "policy_loss", lambda f, lp, old, adv, mask, **kw: f(lp, old, -adv, mask, **kw)
    ),
    "k3 the other way round": lambda: _wrapped(
        losses, "kl_penalty", lambda f, lp, ref, kind: f(2 * lp.detach() - lp, 2 * lp.detach() - ref, kind)
    ),
    "k2 for k3": lambda: _wrapped(losses, "kl_penalty", lambda f, lp, ref, kind: f(lp, ref, "k2")),
    "no correction": lambda: _weights_with(lambda f, old, rollout, keep, spec: f(old, old, keep, spec)),
    "no cap": lambda: _weights_with(
        lambda f, old, rollout, keep, spec: f(old, rollout, keep, dataclasses.replace(spec, cap=1e9))
    ),
    "inverse weight": lambda: _weights_with(lambda f, old, rollout, keep, spec: f(rollout, old, keep, spec)),
    "weight against the current policy": lambda: _wrapped(losses, "corrected_policy_loss", _current_for_proximal),
    "token mean for every aggregation": lambda: _wrapped(
        losses, "token_weights", lambda f, mask, cu, kind, *rest: f(mask, cu, "token_mean", *rest)
    ),
    "length of the pack for that of the sequence": lambda: _wrapped(
        losses, "token_weights", lambda f, mask, cu, *rest: f(mask, torch.stack([cu[0], cu[-1]]), *rest)
    ),
    "weights count masked tokens": lambda: _wrapped(
        losses, "token_weights", lambda f, mask, *rest: f(torch.ones_like(mask), *rest)
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement = MUTATIONS[mutation]()
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        everything_agrees()


def test_mutations_have_something_to_break() -> None:
    everything_agrees()
    assert losses.token_weights is aggregation.token_weights
