"""A replica tells of its engine's busy times, its pauses and loads, and the times of its requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.rollout.engine.engine_load import GAP_S, LOAD_S, LONGEST_S, EngineLoad, ReplicaActivity
from megarl.rollout.engine.engine_requests import SCHEDULED, RequestTimes
from megarl.telemetry.trace import events

IDLE = EngineLoad()


def load(running: int, waiting: int = 0) -> EngineLoad:
    return EngineLoad(0.5, running, waiting)


class Recorded:
    """Stands for the process's events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Any, ...]] = []
        monkeypatch.setattr(events, "record", self.record)

    def record(self, name: str, begin: float, end: float | None = None, **fields: Any) -> None:
        self.found.append((name, begin, end, fields.get("version"), fields.get("args")))

    @property
    def busy(self) -> list[tuple[float, float, int, int]]:
        return [(begin, end, *args.values()) for name, begin, end, _, args in self.found if name == "busy"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def test_steps_become_spans_that_short_breaks_do_not_cut(recorded: Recorded) -> None:
    activity = ReplicaActivity(1)
    for now, requests in (
        (1.0, load(2)), (1.5, load(5, waiting=3)), (2.0, IDLE),
        (2.0 + GAP_S / 2, load(1)),  # it was idle for too short a time
        (3.0, IDLE), (9.0, load(1)),
    ):  # fmt: skip
        activity.step(now, requests)
    assert recorded.busy == [(1.0, 3.0, 5, 3)]
    activity.end()
    activity.end()
    assert recorded.busy[1:] == [(9.0, 9.0, 1, 0)]


def test_a_step_that_takes_long_is_no_break(recorded: Recorded) -> None:
    activity = ReplicaActivity(1)
    activity.step(1.0, load(1))
    activity.step(20.0, load(1))
    activity.end()
    assert recorded.busy == [(1.0, 20.0, 1, 0)]


def test_an_engine_that_is_always_busy_is_told_of_in_parts_without_a_gap(recorded: Recorded) -> None:
    activity = ReplicaActivity(1)
    for second in range(200):
        activity.step(float(second), load(1))
    activity.end()
    assert len(recorded.busy) == 4 and recorded.busy[0][0] == 0.0 and recorded.busy[-1][1] == 199.0
    assert all(end - begin <= LONGEST_S for begin, end, *_ in recorded.busy)
    assert [end for _, end, *_ in recorded.busy[:-1]] == [begin for begin, *_ in recorded.busy[1:]]


def test_publications_and_load(recorded: Recorded) -> None:
    """The pause that a repeated publication begins with ends with the one that succeeds; kept weights are no load."""
    now = [10.0]
    activity = ReplicaActivity(1, lambda: now[0])
    activity.step(10.0, load(3))
    activity.step(11.0, load(4))
    now[0] = 12.0
    activity.pause()
    now[0] = 13.0
    activity.begin_weights()
    activity.pause()
    now[0] = 14.0
    activity.begin_weights()
    now[0] = 15.0
    activity.end_weights("7")
    now[0] = 16.0
    activity.resume("7")
    activity.resume("7")  # a reset resumes what was not paused
    activity.pause()
    activity.begin_weights()
    now[0] = 17.0
    activity.resume("7")
    assert recorded.found == [
        ("load", 10.0, None, None, {"running": 3, "waiting": 0, "kv_usage": 0.5}),
        ("busy", 10.0, 11.0, None, {"running": 4, "waiting": 0}),
        ("load_weights", 14.0, 15.0, 7, None), ("paused", 12.0, 16.0, 7, None), ("paused", 16.0, 17.0, 7, None),
    ]  # fmt: skip
    for at in (20.0, 20.0 + LOAD_S / 2, 20.0 + LOAD_S):
        activity.step(at, IDLE)
    assert [name for name, *_ in recorded.found[5:]] == ["load", "load"]


def output(*kinds: tuple[int, float], tokens: int = 0) -> Any:
    made = [SimpleNamespace(type=kind, timestamp=at) for kind, at in kinds]
    return SimpleNamespace(events=made or None, new_token_ids=[1] * tokens)


QUEUED, PREEMPTED = 1, 3


def test_the_times_of_a_request() -> None:
    now = [5.0]
    times = RequestTimes(lambda: now[0])
    times.begin("a", 1.0)
    assert times.parts("a", ended=False) == (4.0, 0.0), "it waits as long as the engine has not reported it"
    times.hear("a", output((QUEUED, 1.5), (SCHEDULED, 3.0), tokens=1), 4.5)
    now[0] = 50.0
    assert times.parts("a", ended=False) == (2.0, 1.5) == times.parts("a", ended=True)
    times.hear("a", output((PREEMPTED, 20.0), (SCHEDULED, 30.0), tokens=1), 31.0)
    assert times.parts("a", ended=True) == (2.0, 1.5), "what follows the first token is decoding"
    times.end("a")
    assert times.parts("a", ended=True) == (0.0, 0.0)
    times.begin("b", 40.0)
    assert times.parts("b", ended=True) == (0.0, 0.0), "nothing is known of a request that the engine never reported"
    times.hear("unknown", output((SCHEDULED, 3.0), tokens=1), 4.5)


def test_a_prefill_in_several_steps_ends_with_the_first_token() -> None:
    now = [9.0]
    times = RequestTimes(lambda: now[0])
    times.begin("a", 1.0)
    times.hear("a", output((SCHEDULED, 2.0)), 3.0)
    assert times.parts("a", ended=False) == (1.0, 7.0)
    times.hear("a", output((PREEMPTED, 4.0), (SCHEDULED, 5.0), tokens=1), 6.0)
    assert times.parts("a", ended=True) == (1.0, 4.0)


def test_the_hook_hears_of_outputs_with_events_and_passes_all_on() -> None:
    passed: list[Any] = []
    processor = SimpleNamespace(_update_stats_from_output=lambda *given: passed.append(given))
    times = RequestTimes(lambda: 9.0)
    times.listen(SimpleNamespace(output_processor=processor))  # type: ignore[arg-type]
    times.begin("a", 1.0)
    state = SimpleNamespace(external_req_id="a")
    first, second = output((SCHEDULED, 2.0), tokens=1), output(tokens=1)
    processor._update_stats_from_output(state, first, 3.0, None)
    processor._update_stats_from_output(state, second, 4.0, None)
    assert passed == [(state, first, 3.0, None), (state, second, 4.0, None)]
    assert times.parts("a", ended=True) == (1.0, 1.0)


def test_the_number_of_vllm_s_event_is_the_one_that_is_looked_for() -> None:
    engine = pytest.importorskip("vllm.v1.engine", reason="vLLM is not installed")
    assert engine.EngineCoreEventType.SCHEDULED == SCHEDULED
