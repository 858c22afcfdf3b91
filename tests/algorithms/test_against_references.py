"""megarl's packed losses against an independent padded implementation and against TRL's own loss method.

Values, gradients, and that the comparison can fail: each mutation of a rule must break it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from megarl.algorithms import losses
from megarl.algorithms import losses as ppo
from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.algorithms.interface.token_loss import TokenInputs, TokenLoss
from megarl.algorithms.losses import PPOOptions
from megarl.algorithms.objective import objective
from megarl.algorithms.objective import objective as kl
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


def everything_agrees() -> None:
    for (name, spec), kind in itertools.product(VARIANTS.items(), AGGREGATIONS):
        each = dataclasses.replace(spec, aggregation=kind)
        batch = batches(name)[0]
        assert_same(packed_result(batch, each), reference_result(batch, each))
    for name in ("all", "gspo-all"):
        each = dataclasses.replace(VARIANTS[name], aggregation="token_mean")
        batch = batches(name)[1]
        assert_same(packed_result(batch, each), trl_result(batch, each, "dapo"))


Patch = tuple[object, str, object]


def _wrapped(change: Callable[..., object], *places: tuple[object, str]) -> list[Patch]:
    """Patches of one function in all the places that name it; `change` gets the original and its arguments."""
    original = getattr(*places[0])
    return [(place, name, lambda *args, **kwargs: change(original, *args, **kwargs)) for place, name in places]


def _means_with(change: Callable[..., torch.Tensor]) -> list[Patch]:
    return _wrapped(change, (TokenInputs, "sequence_means"))


def _surrogate_with(change: Callable[..., TokenLoss]) -> list[Patch]:
    return _wrapped(change, (ppo, "clipped_surrogate"), (losses, "clipped_surrogate"))


def _inputs_with(change: Callable[..., TokenInputs]) -> list[Patch]:
    return _wrapped(change, (TokenInputs, "of"))


def _inverse_ratio() -> list[Patch]:
    return [(TokenInputs, "log_ratio", property(lambda inputs: inputs.old_logprobs_R - inputs.logprobs_R))]


def _swapped(f: Callable[..., TokenLoss], ratio: torch.Tensor, inputs: TokenInputs, options: PPOOptions) -> TokenLoss:
    return f(ratio, inputs, options.model_copy(update={"clip_low": options.clip_high, "clip_high": options.clip_low}))


def _bounded_for_every_sign(
    f: Callable[..., TokenLoss], ratio: torch.Tensor, inputs: TokenInputs, options: PPOOptions
) -> TokenLoss:
    result = f(ratio, inputs, options)
    if options.clip_dual is None:
        return result
    return dataclasses.replace(result, loss_R=torch.minimum(result.loss_R, -options.clip_dual * inputs.advantages_R))


def _weights_with(change: Callable[..., object]) -> list[Patch]:
    return _wrapped(change, (objective, "importance_weights"))


def _current_for_proximal(
    f: Callable[..., object], spec: objective.Objective, inputs: objective.LossInputs, keep: torch.Tensor
) -> object:
    if spec.correction is None:
        return f(spec, inputs, keep)
    streams = {name: value for name, value in inputs.streams.items() if name != "old_logprobs"}
    return f(spec, dataclasses.replace(inputs, streams=streams), keep)


def _whole_pack(f: Callable[..., torch.Tensor], inputs: TokenInputs, values: torch.Tensor) -> torch.Tensor:
    cuts = inputs.cu_seqlens
    mean_1 = f(dataclasses.replace(inputs, cu_seqlens=torch.stack([cuts[0], cuts[-1]])), values)
    return mean_1.expand(cuts.numel() - 1)


def _all_kept(f: Callable[..., torch.Tensor], inputs: TokenInputs, values: torch.Tensor) -> torch.Tensor:
    return f(dataclasses.replace(inputs, keep_R=torch.ones_like(inputs.keep_R)), values)


MUTATIONS: dict[str, Callable[[], list[Patch]]] = {
    "inverse ratio": _inverse_ratio,
    "sequence ratio is the sum, not the mean": lambda: _means_with(lambda f, inputs, values: 2.0 * f(inputs, values)),
    "sequence mean over masked tokens too": lambda: _means_with(_all_kept),
    "one sequence ratio for the whole pack": lambda: _means_with(_whole_pack),
    "half of the ratio's gradient": lambda: _surrogate_with(lambda f, r, *rest: f((r + r.detach()) / 2, *rest)),
    "clip bounds swapped": lambda: _surrogate_with(_swapped),
    "dual clip for every sign": lambda: _surrogate_with(_bounded_for_every_sign),
    "no dual clip": lambda: _surrogate_with(
        lambda f, r, inputs, options: f(r, inputs, options.model_copy(update={"clip_dual": None}))
    ),
    "mask ignored": lambda: _inputs_with(lambda f, lp, old, adv, mask, cu: f(lp, old, adv, torch.ones_like(mask), cu)),
    "advantage's sign": lambda: _inputs_with(lambda f, lp, old, adv, mask, cu: f(lp, old, -adv, mask, cu)),
    "k3 the other way round": lambda: _wrapped(
        lambda f, lp, ref, kind: f(2 * lp.detach() - lp, 2 * lp.detach() - ref, kind), (kl, "kl_penalty")
    ),
    "k2 for k3": lambda: _wrapped(lambda f, lp, ref, kind: f(lp, ref, "k2"), (kl, "kl_penalty")),
    "no correction": lambda: _weights_with(lambda f, old, rollout, keep, spec, **kw: f(old, old, keep, spec, **kw)),
    "no cap": lambda: _weights_with(
        lambda f, old, rollout, keep, spec, **kw: f(old, rollout, keep, dataclasses.replace(spec, cap=1e9), **kw)
    ),
    "inverse weight": lambda: _weights_with(
        lambda f, old, rollout, keep, spec, **kw: f(rollout, old, keep, spec, **kw)
    ),
    "weight against the current policy": lambda: _wrapped(_current_for_proximal, (objective, "policy_losses")),
    "token mean for every aggregation": lambda: _wrapped(
        lambda f, mask, cu, kind, *rest: f(mask, cu, "token_mean", *rest), (objective, "token_weights")
    ),
    "length of the pack for that of the sequence": lambda: _wrapped(
        lambda f, mask, cu, *rest: f(mask, torch.stack([cu[0], cu[-1]]), *rest), (objective, "token_weights")
    ),
    "weights count masked tokens": lambda: _wrapped(
        lambda f, mask, *rest: f(torch.ones_like(mask), *rest), (objective, "token_weights")
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name, replacement in MUTATIONS[mutation]():
        monkeypatch.setattr(place, name, replacement)
    with pytest.raises(AssertionError):
        everything_agrees()


def test_mutations_have_something_to_break() -> None:
    everything_agrees()
