"""The spans of a rank's steps, and what a resume says of the end of the history."""

from pathlib import Path
from typing import Any

import pytest

from megarl.common.rundir import rotating_lines
from megarl.run.ranks.failure import PeerFailedError
from megarl.run.record.events import LEAST_S, StepEvents, begin_events, end_of_history, end_with_failure
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.telemetry.trace import events
from megarl.telemetry.trace.files import read_events


def test_phases_and_steps_are_recorded_under_the_step_that_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase before the first step is of none, one between two steps of the next; one in another is inside it."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(events, "record", lambda name, begin, end, step: found.append((name, begin, end, step)))
    now, short = [0.0], 2.0**-12
    assert short < LEAST_S

    def clock() -> float:
        return now[0]

    steps = StepEvents(clock)
    timer = PhaseTimer(clock, steps.phase)

    def pass_(seconds: float) -> None:
        now[0] += seconds

    with timer.phase("sync"):
        pass_(1.0)
    steps.finish_step()  # no step has begun
    timer.finish_step()
    steps.begin(5)
    with timer.phase("generate"):
        pass_(2.0)
        with timer.phase("logprobs"):
            pass_(3.0)
        pass_(1.0)
    with timer.phase("queue"):
        pass_(short)
    pass_(1.0)
    took = timer.finish_step()
    steps.finish_step()
    with timer.phase("save"):
        pass_(1.0)
    end = 8.0 + short
    assert found == [
        ("sync", 0.0, 1.0, None), ("logprobs", 3.0, 6.0, 5), ("generate", 1.0, 7.0, 5), ("step", 1.0, end, 5),
        ("save", end, end + 1.0, 6),
    ]  # fmt: skip
    assert took["time/generate"] == 3.0 and took["time/logprobs"] == 3.0


def test_a_phase_that_fails_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(events, "record", lambda name, *_, **__: found.append(name))
    timer = PhaseTimer(iter([0.0, 1.0, 2.0]).__next__, StepEvents().phase)
    with pytest.raises(ValueError, match="boom"), timer.phase("update"):
        raise ValueError("boom")
    assert found == ["update"]


def test_the_end_of_the_history_is_the_last_line_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 33.0)
    assert end_of_history(tmp_path) == 33.0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "wall_time": 17.5, "x": 1}\n{"step": 2, "wall_time": 18.25}\n')
    assert end_of_history(tmp_path) == 18.25
    part = (tmp_path / "metrics.jsonl").rename(tmp_path / f"metrics.{0:0{rotating_lines.DIGITS}d}.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    assert end_of_history(tmp_path) == 18.25, "a new part has begun"
    part.unlink()
    assert end_of_history(tmp_path) == 33.0


@pytest.mark.parametrize(
    ("error", "restarts", "reported"),
    [
        (RuntimeError("disk"), False, [("fault", "run")]),
        (RuntimeError("disk"), True, [("fault", "ranks")]),
        (PeerFailedError("rank 1"), True, []),
    ],
)
def test_the_end_of_a_rank_by_a_failure(
    tmp_path: Path, error: Exception, restarts: bool, reported: list[tuple[str, str]]
) -> None:
    """The rank that has failed reports it; one that follows another does not."""
    begin_events(tmp_path, 0, 8)
    end_with_failure(error, restarts=restarts)
    assert [(each.name, each.args["kind"]) for each in read_events(tmp_path)] == reported


def test_ranks_that_torchrun_has_started_again_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    for rank in (0, 1):
        begin_events(tmp_path, rank, 8)
        events.close_events()
    (found,) = read_events(tmp_path)
    assert (found.process, found.name, found.args["kind"]) == ("trainer-rank-0", "recovery", "ranks")
    assert "restart 2" in str(found.args["text"])
