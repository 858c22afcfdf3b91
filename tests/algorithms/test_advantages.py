"""Advantages, reward shaping, aggregation weights."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.filters import apply_truncation, overlong_penalty
from megarl.algorithms.interface.group_rewards import GroupRewards, advantages_of, zero_variance
from megarl.algorithms.objective.objective import GlobalCounts, token_weights
from tests.support.losses.loss_batches import cu_seqlens
from tests.support.losses.trl_loss import grpo_module

REWARDS = st.lists(st.floats(-5, 5, allow_subnormal=False), min_size=2, max_size=8)


def group_advantages(
    rewards: list[list[float]], name: str, tokens: list[list[int]] | None = None, **options: float
) -> list[list[float]]:
    """Advantages of groups whose samples have one token each, unless `tokens` tells other numbers."""
    counts = tokens if tokens is not None else [[1] * len(group) for group in rewards]
    return advantages_of(ADVANTAGES.find(name).choose(options), GroupRewards(rewards, counts))


def test_dr_grpo_and_rloo_by_hand() -> None:
    assert group_advantages([[3.0, 0.0, 0.0]], "dr_grpo") == [[2.0, -1.0, -1.0]]
    assert group_advantages([[3.0, 0.0, 0.0]], "rloo") == [pytest.approx([3.0, -1.5, -1.5])]


def test_groups_may_differ_in_size_and_a_lone_sample_has_no_advantage() -> None:
    assert group_advantages([[1.0], [], [2.0, 2.0], [1.0, 3.0]], "dr_grpo") == [[0.0], [], [0.0, 0.0], [-1.0, 1.0]]


def test_grpo_equals_trl_on_a_full_batch() -> None:
    """TRL 1.16, grpo_trainer.py: (r - mean) / (nanstd + 1e-4) with `scale_rewards="group"`."""
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (grpo_module().nanstd(rewards, dim=1).unsqueeze(1) + 1e-4)
    ours = torch.tensor(group_advantages(rewards.tolist(), "grpo"), dtype=torch.float64)
    torch.testing.assert_close(ours, theirs)


@given(REWARDS, st.floats(-3, 3), st.sampled_from(("grpo", "dr_grpo", "rloo")))
def test_advantages_are_centred_and_ignore_a_constant(rewards: list[float], shift: float, kind: str) -> None:
    assume(max(rewards) - min(rewards) > 1e-3)
    (advantages,) = group_advantages([rewards], kind)
    (shifted,) = group_advantages([[r + shift for r in rewards]], kind)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    assert shifted == pytest.approx(advantages, abs=1e-6, rel=1e-6)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert [advantages[i] for i in order] == sorted(advantages)


@given(REWARDS)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    assume(not zero_variance(rewards))
    (advantages,) = group_advantages([rewards], "rloo")
    for i, advantage in enumerate(advantages):
        others = rewards[:i] + rewards[i + 1 :]
        assert advantage == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-9)


def test_equal_rewards_have_exactly_zero_advantage() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.3]  # differ in the last bit
    assert zero_variance(rewards)
    for kind in ("grpo", "dr_grpo", "rloo"):
        assert group_advantages([rewards], kind) == [[0.0, 0.0, 0.0]]
    assert not zero_variance([0.0, 1e-6])


def test_bad_rewards_and_kinds_are_errors() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([[1.0, float("nan")]], "grpo")
    with pytest.raises(ValueError, match="rloo"):
        group_advantages([[1.0, 0.0]], "gae")


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (60, 0.0), (61, -0.05), (80, -1.0), (100, -2.0), (130, -2.0)]
)
def test_overlong_penalty_by_hand(length: int, expected: float) -> None:
    assert overlong_penalty(length, max_tokens=100, buffer=40, penalty=2.0) == pytest.approx(expected)


def test_overlong_penalty_off_and_impossible() -> None:
    assert overlong_penalty(10**6, 100, 0, 1.0) == 0.0
    with pytest.raises(ValueError, match="101 tokens"):
        overlong_penalty(1, 100, 101, 1.0)


@given(st.integers(0, 300), st.integers(1, 100), st.floats(0.1, 5))
def test_overlong_penalty_falls_with_length(length: int, buffer: int, penalty: float) -> None:
    here = overlong_penalty(length, 100, buffer, penalty)
    assert -penalty <= overlong_penalty(length + 1, 100, buffer, penalty) <= here <= 0.0


def test_truncation_policies() -> None:
    assert apply_truncation("keep", True, 1.0) == (1.0, True)
    assert apply_truncation("mask", True, 1.0) == (1.0, False)
    assert apply_truncation("zero_reward", True, 1.0) == (0.0, True)
    for policy in ("keep", "mask", "zero_reward"):
        assert apply_truncation(policy, False, 0.7) == (0.7, True)  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6),
    st.sampled_from(("token_mean", "sequence_mean", "constant_length")),
)
def test_weights_of_a_whole_batch(masks: list[list[bool]], aggregation: str) -> None:
    """They sum to 1 for the two means, to the filled share for the constant length; masked tokens weigh 0."""
    counts = GlobalCounts.of([sum(mask) for mask in masks], max_tokens=10)
    mask_R = torch.tensor([token for mask in masks for token in mask], dtype=torch.bool)
    weights = token_weights(mask_R, cu_seqlens([len(m) for m in masks]), aggregation, counts)  # type: ignore[arg-type]
    assert weights.shape == mask_R.shape and weights.dtype == torch.float32
    assert float(weights[~mask_R].abs().sum()) == 0.0
    expected = 1.0 if aggregation != "constant_length" else counts.tokens / max(10 * counts.sequences, 1)
    assert float(weights.sum()) == pytest.approx(expected if counts.tokens else 0.0, rel=1e-5)


def test_counts() -> None:
    counts = GlobalCounts.of([3, 0, 4], 8)
    assert counts == GlobalCounts(tokens=7, sequences=2, max_tokens=8)
    with pytest.raises(ValueError, match="trains 1 tokens"):
        token_weights(torch.ones(1), cu_seqlens([1]), "token_mean", GlobalCounts(0, 0, 8))
