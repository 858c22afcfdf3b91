"""The parts of a sample's time, and the samples of a step that are reported."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.agents.batch_stats import PARTS, SLOWEST, BatchStats, TrajectoryTimes, slowest
from megarl.rollout.engine.messages import GenerateResult
from megarl.rollout.orchestrator.step_batches import BatchReady, record_batch_taken
from megarl.telemetry.trace import events


def result(seconds: float, queue_s: float, prefill_s: float, tokens: int = 5) -> GenerateResult:
    ids, logprobs = [1] * tokens, [0.0] * tokens
    return GenerateResult("x", ids, logprobs, (), "stop", 3, seconds, queue_s=queue_s, prefill_s=prefill_s)


def times(group: int, seconds: float, sample: int = 0, **parts: float) -> TrajectoryTimes:
    known = {f"{part}_s": parts.get(part, 0.0) for part in PARTS[:-1]}
    return TrajectoryTimes(group, sample, 0.0, 0, 1e9, seconds, 1, 10, **known)


def test_the_parts_of_a_sample_add_up_to_its_time() -> None:
    """Two turns, of which the second waited for 3 s outside the engine, a tool and a reward; 0.75 s of the loop."""
    ended = TrajectoryTimes(8, 2, began=100.0)
    ended.add_turn(result(2.0, 0.25, 0.5), 2.0)
    ended.tool_s += 1.5
    ended.add_turn(result(1.0, 0.0, 0.25, tokens=7), 4.0)
    ended.reward_s += 0.5
    ended.end(108.75, 5e8)
    assert (ended.replica, ended.ended) == (3, 5e8)
    assert (ended.seconds, ended.turns, ended.tokens) == (8.75, 2, 12)
    parts = {part: getattr(ended, f"{part}_s") for part in PARTS}
    assert parts == {"queue": 3.25, "prefill": 0.75, "decode": 2.0, "tool": 1.5, "reward": 0.5, "other": 0.75}
    assert sum(parts.values()) == ended.seconds and ended.cause == "queue"
    assert ended.args() == {"turns": 2, "tokens": 12, **{f"{part}_s": value for part, value in parts.items()}}


@pytest.mark.parametrize("part", PARTS[:-1])
def test_the_cause_is_the_largest_part(part: str) -> None:
    assert times(0, 10.0, **{part: 6.0}).cause == part
    assert times(0, 20.0, **{part: 6.0}).cause == "other"


def test_requests_side_by_side_leave_nothing_to_the_rest() -> None:
    ended = TrajectoryTimes(0, 0, 0.0)
    for _ in range(4):
        ended.add_turn(result(3.0, 0.0, 1.0), 3.0)
    ended.end(3.0, 0.0)
    assert ended.other_s == 0.0 and ended.decode_s == 8.0 and ended.cause == "decode"


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 5), st.randoms(use_true_random=False))
def test_workers_and_controller_keep_the_slowest_of_all(
    seconds: list[float], workers: int, shuffle: random.Random
) -> None:
    """However the samples are spread over processes, and in whatever order they end."""
    samples = [times(number, each) for number, each in enumerate(seconds)]
    expected = sorted(samples, key=lambda each: (-each.seconds, each.group))[:SLOWEST]
    shuffle.shuffle(samples)
    stats = [BatchStats() for _ in range(workers)]
    for number, each in enumerate(samples):
        stats[number % workers].note_times(each)
    whole = BatchStats()
    for each in stats:
        assert len(each.slowest) <= SLOWEST
        whole.add(each)
    assert [each.seconds for each in whole.slowest] == [each.seconds for each in expected]
    assert slowest(samples) == expected


def test_a_batch_tells_of_its_slowest_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its step, which metrics.jsonl counts from 1; the end of one on a host whose clock is ahead is now."""
    recorded: list[tuple[str, float, float | None, dict[str, object]]] = []
    monkeypatch.setattr(
        events, "record", lambda name, begin, end=None, **fields: recorded.append((name, begin, end, fields))
    )
    monkeypatch.setattr("megarl.rollout.orchestrator.step_batches.time.monotonic", lambda: 50.0)
    monkeypatch.setattr("megarl.rollout.orchestrator.step_batches.time.time", lambda: 1e9 + 4.0)
    late = times(7, 2.5, tool=2.0)
    ahead = TrajectoryTimes(9, 1, 0.0, 0, 1e9 + 99.0, 3.0, 1, 10, decode_s=3.0)
    batch = BatchReady.__new__(BatchReady)
    object.__setattr__(batch, "step", 4)
    object.__setattr__(batch, "groups", [1, 2, 3])
    record_batch_taken(batch, [late, ahead], in_flight=6)
    assert [(name, begin, end) for name, begin, end, _ in recorded] == [
        ("batch_taken", 50.0, None), ("slow_trajectory", 43.5, 46.0), ("slow_trajectory", 47.0, 50.0)
    ]  # fmt: skip
    assert {fields["step"] for *_, fields in recorded} == {5}
    assert recorded[0][3]["args"] == {"groups": 3, "in_flight": 6}
    assert recorded[1][3]["group"] == 7 and recorded[1][3]["args"]["cause"] == "tool"  # type: ignore[index]
