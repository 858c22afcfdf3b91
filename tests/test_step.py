"""The pure part of a step: every group and every sample ends exactly once, whatever the batch."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batch_metrics import record_batch
from megarl.config.schema import Config
from megarl.queue.schema import SampleTag, sample_key
from megarl.step import plan_step
from megarl.telemetry.declarations import step_metrics


def config(**sections: dict) -> Config:
    base = {
        "run": {"steps": 1},
        "model": {"path": "x"},
        "batch": {"groups": 4, "samples_per_group": 4},
        "sampling": {"max_tokens": 8},
        "data": {"path": "y"},
    }
    return Config.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def tag(group: int, index: int, reward: float, *, tokens: int = 4, version: int = 0, status: str = "ok") -> SampleTag:
    return SampleTag(sample_key(group, index), group, index, 3, tokens, version, "stop", reward, {}, status)  # type: ignore[arg-type]


SAMPLES = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 8),
    st.sampled_from([3, 4]),
    st.sampled_from(["ok", "ok", "failed"]),
)


@given(
    groups=st.lists(st.lists(SAMPLES, min_size=2, max_size=5), max_size=6),
    dp_size=st.integers(1, 3),
    mini_batches=st.integers(1, 3),
)
@settings(deadline=None)
def test_every_sample_is_counted_once(groups: list, dp_size: int, mini_batches: int) -> None:
    tags = [
        tag(g, i, reward, tokens=tokens, version=version, status=status)
        for g, group in enumerate(groups)
        for i, (reward, tokens, version, status) in enumerate(group)
    ]
    plan = plan_step(tags, config(trainer={"mini_batches": mini_batches}), dp_size=dp_size, version=4)
    assert plan.outcome.admitted == len(groups)
    placed = collections.Counter(key for rank in range(dp_size) for key in plan.keys_of(rank))
    trained = {sample.key for group in plan.shaped.groups for sample in group}
    assert set(placed) == trained and set(placed.values()) <= {1}
    for key in placed:
        assert plan.tags[key].status == "ok" and plan.tags[key].oldest_version == 4, "failed or stale sample trained"
    assert len(plan.mini_batches) == min(mini_batches, plan.outcome.trained)
    for part in plan.mini_batches:  # groups are whole within one update
        inside = {key.split(":")[0] for rank in part for key in rank}
        elsewhere = {k.split(":")[0] for other in plan.mini_batches if other is not part for r in other for k in r}
        assert not inside & elsewhere
    metrics = step_metrics()
    record_batch(metrics, plan)
    values = metrics.reduce()
    assert values["batch/samples"] == len(tags)
    assert values["groups/trained"] == plan.outcome.trained


def test_the_plan_does_not_depend_on_the_order_of_the_tags() -> None:
    tags = [tag(g, i, float((g + i) % 2), tokens=1 + i) for g in range(4) for i in range(4)]
    plans = [plan_step(order, config(), dp_size=2, version=0) for order in (tags, tags[::-1])]
    assert plans[0].hash == plans[1].hash and plans[0].mini_batches == plans[1].mini_batches


def test_a_stale_token_keeps_its_group_from_the_update() -> None:
    tags = [tag(g, i, float(i % 2), version=3 if (g, i) == (1, 2) else 4) for g in range(3) for i in range(4)]
    plan = plan_step(tags, config(), dp_size=1, version=4)
    assert plan.outcome.dropped_stale == 1 and plan.outcome.trained == 2
    assert not any(key.startswith("1:") for key in plan.keys_of(0))


def test_permuted_rewards_keep_the_group_s_rewards_but_not_their_owners() -> None:
    tags = [tag(g, i, float(i)) for g in range(8) for i in range(4)]
    fair = plan_step(tags, config(), dp_size=1, version=0)
    control = plan_step(tags, config(algorithm={"permute_rewards": True}), dp_size=1, version=0)
    for honest, shuffled in zip(fair.shaped.groups, control.shaped.groups, strict=True):
        assert sorted(s.reward for s in honest) == sorted(s.reward for s in shuffled)
    assert fair.shaped.groups != control.shaped.groups


def test_permuted_rewards_leave_out_failed_samples() -> None:
    """A failed sample's 0 on one of the solved ones would make a group that has nothing to tell apart."""
    tags = [tag(g, i, float(i != g % 4), status="failed" if i == g % 4 else "ok") for g in range(8) for i in range(4)]
    plan = plan_step(tags, config(algorithm={"permute_rewards": True}), dp_size=1, version=0)
    assert plan.outcome.filtered == 8 and plan.shaped.solved_all == 8


def test_a_sample_that_appears_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="share a key"):
        plan_step([tag(0, 0, 1.0), tag(0, 1, 0.0), tag(0, 1, 0.5)], config(), dp_size=1, version=0)
