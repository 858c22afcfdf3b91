"""The groups that a step has trained are counted where backward ran, and must be those of its plan, each once."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.trajectory import SampleTag, Trajectory, sample_key
from megarl.run.step.plan import CountersDiffer, StepPlan, check_trained, plan_step
from tests.support.losses.step_problem import PER_GROUP, make_step_problem, trajectory
from tests.support.trainer.configs import config
from tests.support.trainer.trained_groups import planned_keys

REUSING = {"mode": "async", "max_staleness": 3, "max_uses": 3}


def plan_of(groups: list[list[int]], reused: list[int], dp_size: int = 2) -> StepPlan:
    """A plan that trains all groups; `groups[g][i]`: the trajectories of sample i of group g."""
    tags = [
        SampleTag(sample_key(g, i, part), g, i, 3, 4, 4, 0, "stop", float(i), {}, "ok", part=part)
        for g, samples in enumerate(groups)
        for i, parts in enumerate(samples)
        for part in range(parts)
    ]
    own = config("model", admission=REUSING, trainer__mini_batches=2)
    plan = plan_step(tags, own, dp_size=dp_size, version=0, reused=reused)
    assert plan.outcome.trained + plan.outcome.reused == len(groups)
    return plan


PLANS = st.builds(
    lambda groups, reused, dp_size: plan_of(groups, sorted(each for each in reused if each < len(groups)), dp_size),
    groups=st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=4), min_size=1, max_size=5),
    reused=st.sets(st.integers(0, 4)),
    dp_size=st.integers(1, 3),
)


def refused(plan: StepPlan, keys: list[str]) -> tuple[int, int]:
    """The groups that were trained, and that rollout counts, as the error tells them."""
    with pytest.raises(CountersDiffer) as caught:
        check_trained(plan, keys)
    found = re.match(r"the step has trained (\d+) groups, and rollout counts (\d+) by its plan: ", str(caught.value))
    assert found is not None, caught.value
    return int(found[1]), int(found[2])


@given(plan=PLANS, draw=st.data())
def test_groups_are_counted_by_their_samples(plan: StepPlan, draw: st.DataObject) -> None:
    """In any order, and however many trajectories they have; also those that an earlier step has trained."""
    found = check_trained(plan, draw.draw(st.permutations(planned_keys(plan))))
    assert found == {*plan.trained_groups, *plan.reused}
    assert (len(found - plan.reused), len(found & plan.reused)) == (plan.outcome.trained, plan.outcome.reused)


@given(plan=PLANS, draw=st.data())
def test_a_group_that_is_left_out_or_trained_twice_is_found(plan: StepPlan, draw: st.DataObject) -> None:
    keys = planned_keys(plan)
    groups = sorted({tag.group_id for tag in plan.tags.values()})
    group = draw.draw(st.sampled_from(groups), label="group")
    own = [key for key in keys if plan.tags[key].group_id == group]
    others = [key for key in keys if key not in own]
    assert refused(plan, others) == (len(groups) - 1, len(groups))
    assert refused(plan, [*keys, *own]) == (len(groups) + 1, len(groups))
    if others:  # a group cannot stand in for another
        other = plan.tags[others[0]].group_id
        twice = [key for key in others if plan.tags[key].group_id == other]
        assert refused(plan, [*others, *twice]) == (len(groups), len(groups))


@given(plan=PLANS, draw=st.data())
def test_a_sample_that_is_left_out_or_trained_twice_is_named(plan: StepPlan, draw: st.DataObject) -> None:
    keys = planned_keys(plan)
    key = draw.draw(st.sampled_from(sorted(keys)), label="sample")
    with pytest.raises(CountersDiffer, match=rf"1 samples were .*\(the first: sample {key}, 0 times instead of 1\)"):
        check_trained(plan, [each for each in keys if each != key])
    with pytest.raises(CountersDiffer, match=rf"1 samples were .*\(the first: sample {key}, 2 times instead of 1\)"):
        check_trained(plan, [*keys, key])


def test_samples_that_the_plan_does_not_train_are_named() -> None:
    """Those of a group that it filters, and of another batch."""
    plan = plan_of([[1, 1], [1, 1]], [])
    tags = [replace(tag, reward=0.0 if tag.group_id else tag.reward) for tag in plan.tags.values()]
    filtering = plan_step(tags, config("model"), dp_size=1, version=0)
    assert filtering.ended == {"trained": [0], "filtered": [1], "dropped_stale": [], "failed": []}
    assert refused(filtering, planned_keys(plan)) == (2, 1)
    with pytest.raises(CountersDiffer, match="sample 9:0, 1 times instead of 0"):
        check_trained(plan, [*planned_keys(plan), "9:0"])


def test_a_step_that_is_skipped_has_trained_nothing() -> None:
    skipped = plan_of([[1, 1], [1, 1]], []).skipped()
    assert skipped is not None and check_trained(skipped, []) == set()
    assert refused(skipped, ["0:0", "0:1"]) == (1, 0)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    model_dir, samples = make_step_problem(tmp_path_factory.mktemp("trained-groups"))
    return model_dir, [trajectory(sample) for sample in samples.values()]


PP2, TP2, DP2 = {"pipeline": 2}, {"tensor": 2}, {}
ONE_EACH = {"trainer__mini_batches": 3}  # each of the three groups that have signal is a mini-batch of its own
REPORTED = "the step has trained {} groups, and rollout counts 3 by its plan"


@pytest.mark.world
@pytest.mark.parametrize(
    ("mistake", "layout", "changes", "groups"),
    [
        ("none", PP2, {}, 3),
        ("none", TP2, ONE_EACH, 3),
        pytest.param("none", DP2, ONE_EACH, 3, marks=pytest.mark.slow),
        pytest.param("a group left out", DP2, ONE_EACH, 2, marks=pytest.mark.slow),
        pytest.param("a group trained twice", TP2, ONE_EACH, 4, marks=pytest.mark.slow),
        pytest.param("micro-batches left out", PP2, {}, 0, marks=pytest.mark.slow),
        ("micro-batches trained twice", DP2, {}, 6),
        pytest.param("a micro-batch left out", DP2, ONE_EACH, 0, marks=pytest.mark.slow),
    ],
)
def test_a_mistake_of_a_real_step_is_found_on_every_rank(
    world: Callable[[int], Any],
    problem: tuple[Path, list[Trajectory]],
    mistake: str,
    layout: dict[str, int],
    changes: dict[str, int],
    groups: int,
) -> None:
    """The last one leaves out the first micro-batch of each update: of each group, one sample or more."""
    model_dir, rows = problem
    got = world(2).run(
        "tests.support.ranks.training.mistaken_step:counted",
        model_dir=model_dir, rows=rows, layout=layout, mistake=mistake, **changes,
    )  # fmt: skip
    if mistake == "none":
        assert [len(each) for each in got] == [3, 3], "ranks of one replica count it once"
    else:
        assert all(reported.startswith(REPORTED.format(groups)) for reported in got), got
    assert len(rows) == 4 * PER_GROUP
