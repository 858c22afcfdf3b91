import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.telemetry.metrics.declarations import REGISTRY
from megarl.telemetry.metrics.timer import PHASES, Phase, PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phases_and_overhead(clock: Clock) -> None:
    timer = PhaseTimer(clock)
    clock.now += 1.0  # nobody's
    for name, seconds in (("generate", 10.0), ("queue", 0.5), ("update", 4.0), ("sync", 2.0), ("eval", 7.0)):
        with timer.phase(name):  # type: ignore[arg-type]
            clock.now += seconds
    step = timer.finish_step(engine_seconds=9.0)
    assert step["time/step"] == 17.5  # without the evaluation
    assert step["time/eval"] == 7.0
    assert step["time/other"] == 1.0
    # 1 s of waiting beyond the engine, 0.5 s queue, 1 s other.
    assert step["time/overhead"] == pytest.approx(2.5)
    assert step["time/overhead_share"] == pytest.approx(2.5 / 17.5)
    assert step["time/trainer_idle_ratio"] == pytest.approx(10 / 17.5)


def test_inner_phase_stops_the_outer_clock(clock: Clock) -> None:
    timer = PhaseTimer(clock)
    with timer.phase("update"):
        clock.now += 1.0
        with timer.phase("queue"):
            clock.now += 5.0
        clock.now += 1.0
    step = timer.finish_step()
    assert (step["time/update"], step["time/queue"]) == (2.0, 5.0)


def test_a_failing_block_is_still_charged(clock: Clock) -> None:
    timer = PhaseTimer(clock)
    with pytest.raises(RuntimeError, match="boom"), timer.phase("sync"):
        clock.now += 3.0
        raise RuntimeError("boom")
    assert timer.finish_step()["time/sync"] == 3.0


def test_misuse(clock: Clock) -> None:
    timer = PhaseTimer(clock)
    with pytest.raises(ValueError, match="unknown phase 'lunch'"), timer.phase("lunch"):  # type: ignore[arg-type]
        pass
    with pytest.raises(RuntimeError, match="inside phase 'sync'"), timer.phase("sync"):
        timer.finish_step()


def test_each_step_starts_at_zero(clock: Clock) -> None:
    timer = PhaseTimer(clock)
    with timer.phase("sync"):
        clock.now += 3.0
    timer.finish_step()
    clock.now += 2.0
    second = timer.finish_step()
    assert (second["time/sync"], second["time/step"], second["time/other"]) == (0.0, 2.0, 2.0)


def test_engine_time_beyond_the_wait_hides_no_overhead(clock: Clock) -> None:
    """An engine that also ran while the trainer computed must not be subtracted twice."""
    timer = PhaseTimer(clock)
    with timer.phase("generate"):
        clock.now += 2.0
    with timer.phase("update"):
        clock.now += 5.0
    with timer.phase("queue"):
        clock.now += 1.0
    assert timer.finish_step(engine_seconds=7.0)["time/overhead"] == pytest.approx(1.0)


def test_the_wait_for_running_responses_is_idle_time_in_which_engines_run(clock: Clock) -> None:
    timer = PhaseTimer(clock)
    for name, seconds in (("generate", 1.0), ("update", 4.0), ("drain", 3.0), ("sync", 2.0)):
        with timer.phase(name):  # type: ignore[arg-type]
            clock.now += seconds
    step = timer.finish_step(engine_seconds=7.0)
    assert step["time/drain"] == 3.0 and step["time/overhead"] == 0.0
    assert step["time/trainer_idle_ratio"] == pytest.approx(4 / 10)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 50)), max_size=12), st.integers(0, 100))
def test_phases_add_up(blocks: list[tuple[Phase, int]], engine: int) -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    for name, seconds in blocks:
        clock.now += 1.0
        with timer.phase(name):
            clock.now += seconds
    step = timer.finish_step(engine)
    assert all(name in {metric.name for metric in REGISTRY} for name in step)
    parts = sum(step[f"time/{name}"] for name in PHASES if name != "eval") + step["time/other"]
    assert parts == pytest.approx(step["time/step"])
    assert 0.0 <= step["time/overhead"] <= step["time/step"]
