"""Metrics of a batch that a report needs: error of the mean reward, percentiles of lengths, tokens by version lag."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.row_format import _tag, decode_tag
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.run.record.batch_metrics import clustered_stderr, nothing_trained, record_batch
from megarl.run.step.plan import plan_step
from megarl.telemetry.metrics.declarations import step_metrics
from tests.support.losses.samples import judged
from tests.support.trainer.configs import config
from tests.support.trainer.trained_groups import trained_as_planned

REWARDS = st.lists(st.floats(-5, 5), min_size=1, max_size=6)


@given(st.lists(REWARDS, min_size=2, max_size=8))
def test_groups_of_one_give_the_usual_error_of_the_mean(groups: list[list[float]]) -> None:
    singles = [[group[0]] for group in groups]
    values = [group[0] for group in groups]
    usual = statistics.stdev(values) / math.sqrt(len(values))
    assert clustered_stderr(singles) == pytest.approx(usual, abs=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.integers(1, 5))
def test_samples_that_repeat_their_group_add_no_knowledge(values: list[float], copies: int) -> None:
    once, often = [[value] for value in values], [[value] * copies for value in values]
    assert clustered_stderr(often) == pytest.approx(clustered_stderr(once), abs=1e-9)


def trajectory(group: int, index: int, spans: tuple[VersionSpan, ...], mask: list[int] | None = None) -> Trajectory:
    tokens = spans[-1].end
    return Trajectory(group, index, [1], [2] * tokens, [-0.5] * tokens, spans, "stop", float(index),
                      response_mask=mask or [])  # fmt: skip


def test_tokens_are_counted_by_the_age_of_their_weights() -> None:
    rows = [
        trajectory(0, 0, (VersionSpan(3, 0, 2), VersionSpan(5, 2, 9))),
        trajectory(0, 1, (VersionSpan(4, 0, 6),), mask=[1, 1, 0, 0, 0, 1]),
        trajectory(1, 0, (VersionSpan(5, 0, 4),)),
        trajectory(1, 1, (VersionSpan(6, 0, 5, lost=1, epoch=1),)),  # counts as 4: one update back, one forward
    ]
    metrics = step_metrics()
    plan = plan_step([row.tag for row in rows], config("model"), dp_size=1, version=5)
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    prefix = "rollout/version_lag_tokens/"
    lags = {name[len(prefix) :]: value for name, value in values.items() if name.startswith(prefix)}
    assert lags == {"0": 11, "1": 8, "2": 2}
    sampled = sum(sum(row.response_mask) for row in rows)
    assert sum(lags.values()) == sampled


def test_the_tag_of_a_row_keeps_the_tokens_by_version() -> None:
    row = trajectory(0, 0, (VersionSpan(3, 0, 2), VersionSpan(5, 2, 9), VersionSpan(3, 9, 12)))
    assert row.tag.version_tokens == {"3": 5, "5": 7}
    assert decode_tag(_tag(row)) == row.tag
    assert json.loads(next(iter(_tag(row).values())))["version_tokens"] == {"3": 5, "5": 7}


def test_lengths_have_percentiles_and_rewards_an_error() -> None:
    tags = [
        judged(f"{group}:{index}", float(group % 2), 10 * group + index + 1)
        for group in range(10)
        for index in range(10)
    ]
    metrics = step_metrics()
    plan = plan_step(tags, config("model"), dp_size=1, version=0)
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    lengths = [values[f"rollout/response_length_p{percent}"] for percent in (10, 50, 90, 99)]
    assert lengths == [11, 51, 91, 100]
    assert values["reward/stderr"] == pytest.approx(math.sqrt(10 * 0.25 / 9 / 10))
    plan = plan_step(tags[:10], config("model"), dp_size=1, version=0)
    record_batch(metrics, plan, trained_as_planned(plan))
    assert "reward/stderr" not in metrics.reduce(), "one group tells nothing about the others"


@pytest.mark.parametrize(
    ("rewards", "accuracy"), [((0.0, 1.0, 1.0), 2 / 3), ((0.0, 0.5, 1.0), None), ((1.0, 2.0), None)]
)
def test_only_verdicts_have_an_accuracy(rewards: tuple[float, ...], accuracy: float | None) -> None:
    """Of graded rewards no share of right or wrong groups is known either."""
    tags = [judged(f"0:{index}", reward, 5) for index, reward in enumerate(rewards)]
    metrics = step_metrics()
    plan = plan_step(tags, config("model"), dp_size=1, version=0)
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    assert values.get("reward/accuracy") == (None if accuracy is None else pytest.approx(accuracy))
    assert ("groups/solve_all" in values) == ("groups/solve_none" in values) == (accuracy is not None)


def test_a_step_that_trains_nothing_tells_why() -> None:
    def group(number: int, rewards: tuple[float, float]) -> list[Trajectory]:
        return [
            Trajectory(number, index, [1], [2], [-0.5], (VersionSpan(0, 0, 1),), "stop", reward)
            for index, reward in enumerate(rewards)
        ]

    equal = [row.tag for number in range(3) for row in group(number, (1.0, 1.0))]
    plan = plan_step(equal, config("model"), dp_size=1, version=0)
    assert nothing_trained(plan) == (
        "nothing was trained: of 3 groups 3 filtered because all their rewards are equal "
        "(algorithm.filter_zero_variance)"
    )
    unequal = [row.tag for row in group(3, (1.0, 0.0))]
    assert nothing_trained(plan_step([*equal, *unequal], config("model"), dp_size=1, version=0)) == ""
