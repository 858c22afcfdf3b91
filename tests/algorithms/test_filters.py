"""shape_batch: every sample that comes in leaves exactly once, with the right reward and advantage."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.filters import ShapedBatch, ShapingSpec, shape_batch, without_signal
from megarl.queue.trajectory import SampleTag
from tests.support.losses.samples import judged


def group(name: str, *rewards: float, **kwargs: bool) -> list[SampleTag]:
    return [judged(f"{name}:{i}", r, **kwargs) for i, r in enumerate(rewards)]


def shaping(**changes: Any) -> ShapingSpec:
    """Mean-free rewards, the filter on, everything else off."""
    options: dict[str, Any] = dict(
        truncated="keep",
        max_tokens=8,
        overlong_buffer=0,
        overlong_penalty=1.0,
        filter_zero_variance=True,
    )
    return ShapingSpec(**options | changes)


def shaped(groups: list[list[SampleTag]], spec: ShapingSpec, advantage: str = "dr_grpo") -> ShapedBatch:
    return shape_batch(groups, spec, ADVANTAGES.find(advantage).choose({}))


def test_mixed_batch() -> None:
    groups = [
        group("a", 1.0, 0.0),
        group("b", 1.0, 1.0),
        group("c", 0.0, 0.0, 0.0),
        [*group("d", 1.0), judged("d:1", 0.0, 5, failed=True)],
        [*group("e", 0.0, 1.0), judged("e:2", 9.0, 5, failed=True)],
    ]
    batch = shaped(groups, shaping())
    assert [[(s.key, s.advantage) for s in g] for g in batch.groups] == [
        [("a:0", 0.5), ("a:1", -0.5)],
        [("e:0", -0.5), ("e:1", 0.5)],  # the failed sample is in no baseline
    ]
    assert (batch.trained_groups, batch.filtered_groups, batch.failed_groups) == (2, 2, 1)


def by_turn(name: str, *samples: tuple[float, list[float]], **kwargs: bool) -> list[SampleTag]:
    """Samples (reward, rewards of their turns)."""
    made = group(name, *(reward for reward, _ in samples), **kwargs)
    return [replace(tag, turn_rewards=turns) for tag, (_, turns) in zip(made, samples, strict=True)]


def test_rewards_of_turns_are_a_signal_for_an_advantage_by_turn_alone() -> None:
    groups = [by_turn("a", (1.0, [0.0, 1.0]), (1.0, [1.0])), by_turn("b", (1.0, [2.0]), (1.0, [2.0, 7.0]))]
    assert [without_signal(each, shaping(by_turn=True)) for each in groups] == [False, True]
    assert all(without_signal(each, shaping()) for each in groups)
    batch = shaped(groups, shaping(by_turn=True), "mt_grpo")
    assert [s.key for s in batch.groups[0]] == ["a:0", "a:1"] and batch.filtered_groups == 1
    low, high = -0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)
    first, second = batch.groups[0]
    assert first.turn_advantages == pytest.approx((low, 0.0)) and first.advantage == pytest.approx(low / 2)
    assert second.turn_advantages == pytest.approx((high,)) and first.turn_rewards == [0.0, 1.0]
    assert shaped(groups, shaping(filter_zero_variance=False)).groups[0][0].turn_advantages == []


def test_the_turns_of_a_sample_are_those_of_all_its_parts() -> None:
    first, other = by_turn("a", (1.0, [0.0, 1.0]), (1.0, [2.0, 1.0, 4.0]))
    part = replace(other, key="a:1.1", part=1, turn_rewards=[5.0])
    batch = shaped([[first, other, part]], shaping(by_turn=True), "mt_grpo")
    _, before, after = batch.groups[0]
    assert len(before.turn_advantages) == 3 and after.turn_advantages == [0.0] and after.advantage == before.advantage


def test_shaping_reaches_the_rewards_of_turns() -> None:
    """A truncated sample's reward is taken whole; the control's are shuffled among the samples that have the turn."""
    cut, kept = by_turn("a", (1.0, [3.0, 1.0]), (0.0, [2.0]))
    taken = shaped([[replace(cut, finish_reason="length"), kept]], shaping(truncated="zero_reward", by_turn=True))
    assert [s.turn_rewards for s in taken.groups[0]] == [[0.0, 0.0], [2.0]]
    spec = shaping(permutation_seed=1, by_turn=True)
    groups = [by_turn(name, *((float(i), [float(i), 10.0 + i][: 1 + i % 2]) for i in range(4))) for name in "abcd"]
    moved = shaped(groups, spec, "mt_grpo").groups
    for honest, rows in zip(groups, moved, strict=True):
        for turn in range(2):
            before = [tag.turn_rewards[turn] for tag in honest if turn < len(tag.turn_rewards)]
            after = [row.turn_rewards[turn] for row in rows if turn < len(row.turn_rewards)]
            assert sorted(before) == sorted(after)
        assert [len(row.turn_rewards) for row in rows] == [1, 2, 1, 2]
    assert any(row.turn_rewards != tag.turn_rewards for g, rows in zip(groups, moved, strict=True)
               for tag, row in zip(g, rows, strict=True))  # fmt: skip


def test_filter_off_trains_on_zero_advantages() -> None:
    batch = shaped([group("a", 1.0, 1.0)], shaping(filter_zero_variance=False), "grpo")
    assert [s.advantage for s in batch.groups[0]] == [0.0, 0.0]
    assert (batch.trained_groups, batch.filtered_groups) == (1, 0)


def test_the_filter_judges_shaped_rewards() -> None:
    """Equal raw rewards with unequal overlong penalties have an advantage; zeroed truncated ones have none."""
    long = [judged("a:0", 1.0, 4), judged("a:1", 1.0, 8, truncated=True)]
    batch = shaped([long], shaping(overlong_buffer=4))
    assert [(s.reward, s.advantage) for s in batch.groups[0]] == [(1.0, 0.5), (0.0, -0.5)]
    cut = [judged("a:0", 0.0, 4), judged("a:1", 1.0, 8, truncated=True)]
    zeroed = shaped([cut], shaping(truncated="zero_reward"), "grpo")
    assert (zeroed.trained_groups, zeroed.filtered_groups) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "samples", "dropped"),
    [
        ({}, [judged("a:0", 1.0), judged("a:1", 1.0)], True),
        ({}, [judged("a:0", 1.0), judged("a:1", 0.0)], False),
        ({"filter_zero_variance": False}, [judged("a:0", 1.0), judged("a:1", 1.0)], False),
        ({}, [judged("a:0", 1.0), judged("a:1", 1.0, failed=True)], False),  # failed, not without signal
        ({}, [judged("a:0", 1.0), judged("a:1", 1.0), judged("a:2", 0.0, failed=True)], True),
        ({"overlong_buffer": 4}, [judged("a:0", 1.0, 4), judged("a:1", 1.0, 8)], False),
        ({"truncated": "zero_reward"}, [judged("a:0", 0.0), judged("a:1", 1.0, truncated=True)], True),
        ({"truncated": "mask"}, [judged("a:0", 0.0), judged("a:1", 1.0, truncated=True)], False),
    ],
)
def test_groups_without_signal(changes: dict[str, Any], samples: list[SampleTag], dropped: bool) -> None:
    spec = shaping(**changes)
    assert without_signal(samples, spec) == dropped
    assert shaped([samples], spec).filtered_groups == dropped


def test_masked_samples_stay_in_the_baseline_but_not_in_the_loss() -> None:
    samples = [judged("a:0", 1.0, 4), judged("a:1", 0.0, 8, truncated=True)]
    batch = shaped([samples], shaping(truncated="mask"))
    assert [(s.trained, s.advantage) for s in batch.groups[0]] == [(True, 0.5), (False, -0.5)]
    assert batch.masked_samples == 1


def test_equal_keys_are_an_error() -> None:
    with pytest.raises(ValueError, match="share a key"):
        shaped([group("a", 1.0, 0.0), group("a", 1.0, 0.0)], shaping())


SAMPLE = st.tuples(st.sampled_from((0.0, 0.5, 1.0)), st.integers(0, 8), st.booleans(), st.booleans())


@given(
    st.lists(st.lists(SAMPLE, max_size=5), max_size=6),
    st.sampled_from(("keep", "mask", "zero_reward")),
    st.booleans(),
    st.integers(0, 8),
)
def test_kept_groups_are_whole_and_each_group_is_counted_once(
    raw: list, truncated: str, filtering: bool, buffer: int
) -> None:
    groups = [
        [judged(f"{g}:{i}", r, size, truncated=cut, failed=lost) for i, (r, size, cut, lost) in enumerate(samples)]
        for g, samples in enumerate(raw)
    ]
    spec = ShapingSpec(truncated, 8, buffer, 0.5, filtering)  # type: ignore[arg-type]
    batch = shaped(groups, spec, "grpo")
    kept = [sample.key for each in batch.groups for sample in each]
    alive = [[sample.key for sample in each if not sample.failed] for each in groups]
    whole = [keys for keys in alive if keys and set(keys) <= set(kept)]
    assert kept == [key for keys in whole for key in keys] and len(whole) == batch.trained_groups
    assert batch.failed_groups == sum(len(keys) < 2 for keys in alive)
    assert batch.trained_groups + batch.filtered_groups + batch.failed_groups == len(groups)


@st.composite
def split_groups(draw: st.DrawFn) -> tuple[list[list[SampleTag]], list[list[SampleTag]]]:
    """Groups of samples, and the same groups with each sample split into rows that are no longer than it."""
    whole, split = [], []
    for number in range(draw(st.integers(1, 4))):
        samples = [
            judged(f"{number}:{index}", draw(st.sampled_from([0.0, 0.5, 1.0])), draw(st.integers(1, 8)),
                   truncated=draw(st.booleans()), failed=draw(st.booleans()))
            for index in range(draw(st.integers(2, 4)))
        ]  # fmt: skip
        whole.append(samples)
        split.append([row for sample in samples for row in parts_of(draw, sample)])
    return whole, split


def parts_of(draw: st.DrawFn, sample: SampleTag) -> list[SampleTag]:
    """Rows of which one is as long as the sample and ends as it does; the others are no longer and may end well."""
    count = draw(st.integers(1, 3))
    longest = draw(st.integers(0, count - 1))
    return [
        replace(sample, key=f"{sample.key}.{part}" if part else sample.key, part=part) if part == longest
        else replace(sample, key=f"{sample.key}.{part}" if part else sample.key, part=part, finish_reason="stop",
                     response_tokens=draw(st.integers(1, sample.response_tokens)))
        for part in range(count)
    ]  # fmt: skip


@given(
    groups=split_groups(),
    advantage=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    truncated=st.sampled_from(["keep", "mask", "zero_reward"]),
    buffer=st.sampled_from([0, 4]),
    seed=st.sampled_from([None, 3]),
)
def test_splitting_a_sample_changes_no_advantage_and_no_count(
    groups: Any, advantage: str, truncated: str, buffer: int, seed: int | None
) -> None:
    spec = shaping(truncated=truncated, overlong_buffer=buffer, permutation_seed=seed)
    whole, split = (shaped(each, spec, advantage) for each in groups)
    expected = {row.key: (row.reward, row.advantage, row.trained) for group in whole.groups for row in group}
    rows = [row for group in split.groups for row in group]
    assert {row.key.split(".")[0] for row in rows} == expected.keys()
    for row in rows:
        assert (row.reward, row.advantage, row.trained) == expected[row.key.split(".")[0]]
    reported = [(b.trained_groups, b.filtered_groups, b.failed_groups, b.masked_samples) for b in (whole, split)]
    assert reported[0] == reported[1]
