"""The controller's measurements of a batch: busy time of the engine, and metrics that are declared."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.agents.batch_stats import BatchStats, BusyClock, quantile
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.telemetry.metrics.declarations import step_metrics


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=20))
def test_busy_time_is_the_union_of_the_intervals(spans: list[tuple[int, int, int]]) -> None:
    """Each triple is (end, time at the engine, time on the way); only the time at the engine counts."""
    clock, busy = BusyClock(), set()
    ends = sorted((start + length + way, length, start, key) for key, (start, length, way) in enumerate(spans))
    for key, (start, _, _) in enumerate(spans):
        clock.enter(key, start)
    for end, length, _, key in ends:
        clock.leave(key, end, length)
        busy |= set(range(end - length, end))
    assert clock.take(1000) == len(busy)
    assert clock.take(2000) == 0


def test_a_running_request_counts_up_to_now_and_once() -> None:
    clock = BusyClock()
    clock.enter(1, 1.0)
    assert clock.take(3.5) == 2.5
    clock.leave(1, 4.0, 2.9)
    assert clock.take(9.0) == 0.5
    with pytest.raises(KeyError):
        clock.leave(1, 9.0, 1.0)
    clock.enter(2, 10.0)
    clock.leave(2, 11.0, 5.0)  # no longer than it was away
    assert clock.take(12.0) == 1.0


LOAD = EngineLoad(0.5, 3, 1)


def test_batch_metrics() -> None:
    stats = BatchStats(
        [0.1, 0.4, 0.2, 0.3],
        [0.01, 0.03],
        reward_errors=Counter({"timeout": 2, "crash": 1}),
        rewards_redone=4,
        skipped_prompts=5,
    )
    values = stats.metrics(replicas_serving=2, replicas_lost=0, load=LOAD)
    assert "rollout/idle_ratio" not in values  # of the first batch there is none before
    busy = BatchStats(engine_seconds=3.0, interval=4.0).metrics(replicas_serving=1, replicas_lost=0, load=LOAD)
    assert busy["rollout/idle_ratio"] == 0.25
    assert [values[f"rollout/{name}_max"] for name in ("kv_usage", "running", "waiting")] == [0.5, 3, 1]
    assert values["reward/errors"] == 3 and values["reward/redone"] == 4
    assert values["rollout/skipped_prompts"] == 5
    assert values["rollout/generate_seconds_max"] == 0.4 and values["rollout/generate_seconds_p50"] == 0.3
    assert values["rollout/reward_seconds_mean"] == pytest.approx(0.02)
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert "rollout/generate_seconds_p50" not in BatchStats().metrics(replicas_serving=1, replicas_lost=0, load=LOAD)


def test_batch_metrics_are_declared() -> None:
    metrics, stats = step_metrics(), BatchStats([0.1], [0.1])
    stats.note_replaced([row.tag for row in recorded_rows(1.0, 1.0)])
    metrics.update(stats.metrics(replicas_serving=1, replicas_lost=0, load=LOAD))
    assert metrics.reduce()["rollout/replicas_alive"] == 1


def recorded_rows(*rewards: float | None) -> list[Trajectory]:
    """The rows of a group, with three tokens each; None is a failed sample."""
    return [
        Trajectory(
            0, index, [1], [7] * 3, [-0.5] * 3, (VersionSpan(0, 0, 3),), "stop", reward or 0.0,
            status="failed" if reward is None else "ok",
        )
        for index, reward in enumerate(rewards)
    ]  # fmt: skip


def test_replaced_groups_are_measured_by_group() -> None:
    stats = BatchStats()
    stats.note_replaced([row.tag for row in recorded_rows(1.0, 1.0, None)])
    stats.note_replaced([row.tag for row in recorded_rows(0.0, 0.0)])
    values = stats.metrics(replicas_serving=1, replicas_lost=0, load=LOAD)
    assert (values["rollout/replaced_reward_mean"], values["rollout/replaced_tokens"]) == (0.5, 15)
