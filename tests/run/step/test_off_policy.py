"""Tokens of other weights in a step: masks before its updates, and a proximal policy without a pass."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.queue.streams import PROXIMAL_ALPHA
from megarl.queue.trajectory import Trajectory, VersionSpan, sample_key
from megarl.run.step.off_policy import set_interpolation, token_lags
from megarl.trainer.batch import TrainSample
from tests.support.losses.loss_batches import loss_spec
from tests.support.losses.rl_problem import CLIP, ENTROPY, padded_gradients
from tests.support.losses.samples import full, with_streams
from tests.support.losses.step_problem import REWARDS, by_group, make_step_problem, resampled, trajectory
from tests.support.models.tensors import worst

STEP = "tests.support.ranks.training.off_policy:corrected_step"
HIGH = 0.1  # of token_k2: |log p - log q| <= 0.45
CAP = 1.1
KEPT = {
    "kind": "token_tis", "cap": CAP, "masks": [{"kind": "token_k2", "high": HIGH}], "denominator": "kept",
}  # fmt: skip
Problem = tuple[Path, dict[str, TrainSample]]


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """A tiny model and samples of four groups, whose reference log-probs are the model's own."""
    return make_step_problem(tmp_path_factory.mktemp("off_policy"))


def row_of(*spans: VersionSpan, mask: list[int] | None = None) -> Trajectory:
    length = spans[-1].end
    return Trajectory(
        group_id=0, sample_index=0, prompt_ids=[1], response_ids=[2] * length, rollout_logprobs=[-1.0] * length,
        versions=spans, finish_reason="stop", reward=0.0, response_mask=mask or [],
    )  # fmt: skip


def test_a_token_lags_by_the_updates_since_its_own_weights() -> None:
    row = row_of(VersionSpan(3, 0, 2), VersionSpan(5, 2, 3), VersionSpan(7, 3, 5), mask=[1, 1, 1, 0, 1])
    assert token_lags(row, 7) == [4, 4, 2, 0, 0]


def test_a_token_of_discarded_updates_lags_by_the_way_back() -> None:
    """Version 6 with two lost updates: two back to version 4, and three forward to 7."""
    assert token_lags(row_of(VersionSpan(6, 0, 1, lost=2, epoch=1)), 7) == [5]


@pytest.mark.parametrize(("updates", "expected"), [(0, [1.0, 1.0, 1.0]), (1, [0.8, 0.5, 0.0]), (3, [4 / 7, 0.25, 0.0])])
def test_the_proximal_policy_lies_between_by_versions(updates: int, expected: list[float]) -> None:
    row = row_of(VersionSpan(3, 0, 1), VersionSpan(6, 1, 2), VersionSpan(7, 2, 3))
    sample = TrainSample(key=row.key, prompt_ids=[1], response_ids=[2] * 3)
    set_interpolation([sample], {row.key: row}, version=7, updates=updates)
    assert sample.streams[PROXIMAL_ALPHA].tolist() == pytest.approx(expected)


def test_a_token_of_newer_weights_than_those_of_the_step_is_an_error() -> None:
    row = row_of(VersionSpan(8, 0, 1))
    with pytest.raises(ValueError, match="1 updates newer than those of the step"):
        set_interpolation([TrainSample(row.key, [1], [2])], {row.key: row}, version=7, updates=1)


def kept_mask(sample: TrainSample) -> torch.Tensor:
    own, sampling = sample.streams["reference_logprobs"], sample.streams["old_logprobs"]
    assert own is not None and sampling is not None
    return 0.5 * (own - sampling).double().square() <= HIGH


def expected_samples(samples: dict[str, TrainSample]) -> list[TrainSample]:
    """The samples of the groups with signal, with advantages, without the tokens that the mask leaves out."""
    result = []
    for group in (0, 1, 3):
        for index, advantage in enumerate(by_group(REWARDS[group], "grpo")):
            sample = samples[sample_key(group, index)]
            with_mask = replace(sample, loss_mask_R=kept_mask(sample))
            result.append(with_streams(resampled(with_mask), advantages=full(sample, advantage)))
    return result


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
def test_masked_tokens_that_do_not_count_are_out_of_the_whole_objective(
    world: Callable[[int], Any],
    problem: Problem,
    ranks: int,
) -> None:
    model_dir, samples = problem
    rows = [trajectory(sample) for sample in samples.values()]
    changes = {"algorithm__kl": {"coef": 0.4}, "algorithm__correction": KEPT}
    got = world(ranks).run(STEP, model_dir=model_dir, rows=rows, **changes)
    expected = expected_samples(samples)
    masks = torch.cat([sample.loss_mask_R for sample in expected if sample.loss_mask_R is not None])
    rejected = 1.0 - float(masks.double().mean())
    assert 0.1 < rejected < 0.9
    seen = {key: value for part in got for key, value in part["updates"][0].items()}
    assert {key: mask for key, (mask, _, _) in seen.items()} == {
        each.key: each.loss_mask_R.tolist() for each in expected if each.loss_mask_R is not None
    }
    spec = loss_spec(
        clip_low=CLIP, clip_high=CLIP, kl_coef=0.4, entropy_coef=ENTROPY, correction=CorrectionSpec("token_tis", CAP)
    )
    _, gradients = padded_gradients(model_dir, expected, spec)
    merged = {name: value for part in got for name, value in part["gradients"].items()}
    assert worst(merged, gradients) <= 1e-4
    metrics = got[0]["metrics"]
    assert metrics["correction/token_k2/rejected_share"] == metrics["correction/masked_share"]
    assert metrics["correction/masked_share"] == pytest.approx(rejected)
    assert metrics["policy/tokens"] == int(masks.sum())
    ratios = torch.cat([s.streams["old_logprobs"] - s.streams["rollout_logprobs"] for s in expected]).double().exp()
    weights = ratios.clamp(max=CAP) * masks
    assert metrics["correction/weight_mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
    ess = float(weights.sum() ** 2 / len(weights) / weights.square().sum())
    assert metrics["correction/ess"] == pytest.approx(ess, rel=1e-5)


@pytest.mark.world
def test_a_step_whose_tokens_are_all_masked_makes_no_update(
    world: Callable[[int], Any],
    problem: Problem,
) -> None:
    model_dir, samples = problem
    none = KEPT | {"masks": [{"kind": "token_k2", "high": 1e-12}]}
    rows = [trajectory(sample) for sample in samples.values()]
    [got] = world(1).run(STEP, model_dir=model_dir, rows=rows, algorithm__correction=none)
    assert got["updates"] == [] and got["metrics"]["policy/updates"] == 0
    assert got["metrics"]["correction/masked_share"] == got["metrics"]["correction/dropped_sequences_share"] == 1.0
    assert got["metrics"]["correction/ess"] == 0.0


@pytest.mark.world
def test_an_interpolated_proximal_policy_saves_the_pass(
    world: Callable[[int], Any],
    problem: Problem,
) -> None:
    """The first update is that of a recomputed one, and the second has its share by each token's lag."""
    model_dir, samples = problem
    rows = [
        replace(trajectory(sample), versions=(VersionSpan(9, 0, 1), VersionSpan(12, 1, len(sample.response_ids))))
        for sample in samples.values()
    ]
    changes: dict[str, Any] = {
        "trainer__mini_batches": 2,
        "admission": {"mode": "async", "sync_interval": 4, "max_staleness": 7},
        "algorithm__kl": {"coef": 0.0},
    }

    def run(**correction: Any) -> list[dict[str, Any]]:
        options = {"kind": "token_tis", **correction}
        return world(2).run(STEP, model_dir=model_dir, rows=rows, version=12, algorithm__correction=options, **changes)

    recomputed, interpolated = run(), run(proximal="loglinear")
    assert [part["passes"] for part in recomputed] == [1, 1] and [part["passes"] for part in interpolated] == [0, 0]
    merged = [
        {name: value for part in run for name, value in part["gradients"].items()} for run in (interpolated, recomputed)
    ]
    assert worst(*merged) <= 1e-5
    for one, other in zip(recomputed, interpolated, strict=True):
        first, second = other["updates"]
        for _, alpha, has_old in first.values():
            assert set(alpha) == {1.0} and not has_old
        for _, alpha, has_old in second.values():
            assert alpha[0] == 0.75 and set(alpha[1:]) <= {0.0} and not has_old
    changed = [
        name
        for one, other in zip(recomputed, interpolated, strict=True)
        for name in one["weights"]
        if not torch.equal(one["weights"][name], other["weights"][name])
    ]
    assert changed  # by the second update
    names = {name for name in interpolated[0]["metrics"] if name.startswith("mismatch/logprob")}
    assert {"mismatch/logprob_abs_diff_mean", "mismatch/logprob_abs_diff_max", "mismatch/logprob_pearson"} <= names
