"""Events as they are written and read again: torn lines, several starts, rotation, deletion, resumes."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.telemetry.trace.files import EventTail, Rollback, event_files, read_events
from megarl.telemetry.trace.kinds import UndeclaredEvent
from megarl.telemetry.trace.lines import CONTROLLER, rank_process
from tests.support.telemetry.event_runs import UNIX, SimulatedClock, event_writer


def test_an_event_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    clock = SimulatedClock()
    writer = event_writer(tmp_path, rank_process(0), clock)
    writer.record(
        "turn", 1002.0, 1003.5, step=3, version=7, group=5, sample=2, replica=1, args={"turn": 0, "queue_s": 0.25}
    )
    writer.record("fault", 1004.0, replica=1, args={"kind": "engine", "text": "größer \n than"})
    writer.flush()
    (turn,) = read_events(tmp_path, {"turn"})
    assert (turn.process, turn.name, turn.step, turn.version) == ("trainer-rank-0", "turn", 3, 7)
    assert (turn.group, turn.sample, turn.replica) == (5, 2, 1)
    assert turn.begin == pytest.approx(UNIX + 2.0, abs=1e-5) and turn.seconds == pytest.approx(1.5)
    assert turn.end == pytest.approx(UNIX + 3.5, abs=1e-5)
    assert dict(turn.args) == {"turn": 0, "queue_s": 0.25} and not turn.rolled_back
    assert [(each.name, each.args.get("text")) for each in read_events(tmp_path)] == [
        ("turn", None), ("fault", "größer \n than")
    ]  # fmt: skip


def test_a_wall_clock_that_steps_does_not_tear_a_file_apart(tmp_path: Path) -> None:
    clock = SimulatedClock()
    writer = event_writer(tmp_path, rank_process(0), clock)
    writer.record("update", 1000.0, 1001.0, step=1)
    writer.flush()
    clock.now, clock.ahead = 1010.0, -500.0
    writer.record("update", 1010.0, 1011.0, step=2)
    writer.flush()
    first, second = read_events(tmp_path)
    assert second.begin - first.begin == pytest.approx(10.0)


@given(st.integers(0, 400))
@settings(max_examples=40, deadline=None)
def test_a_file_may_end_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """A prefix of the bytes gives a prefix of the events, and what comes later is read then."""
    run = tmp_path_factory.mktemp("run")
    clock = SimulatedClock()
    writer = event_writer(run, rank_process(0), clock)
    for step in range(1, 6):
        writer.record("update", 1000.0 + step, 1000.5 + step, step=step)
    writer.flush()
    (name,) = event_files(run)
    whole = name.path(run).read_bytes()
    name.path(run).write_bytes(whole[:cut])
    tail = EventTail(run)
    early = [each.step for each in tail.poll()]
    assert early == [1, 2, 3, 4, 5][: len(early)]
    assert len(early) == max(0, whole[:cut].count(b"\n") - 1)
    name.path(run).write_bytes(whole)
    assert early + [each.step for each in tail.poll()] == [1, 2, 3, 4, 5]


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    writer = event_writer(tmp_path, rank_process(0), SimulatedClock())
    writer.record("update", 1001.0, 1002.0, step=1)
    writer.flush()
    (name,) = event_files(tmp_path)
    with name.path(tmp_path).open("ab") as file:
        file.write(b'{"n":"upd\n\n{"n":"update","t":"no number"}\n{"n":"of_a_later_release","t":3}\n')
        file.write(b'{"n":"update","t":1003000000,"s":2}\n')
    tail = EventTail(tmp_path)
    assert [each.step for each in tail.poll()] == [1, 2]


def test_only_the_files_of_the_named_events_are_opened(tmp_path: Path) -> None:
    writer = event_writer(tmp_path, rank_process(0), SimulatedClock())
    writer.record("update", 1001.0, 1002.0, step=1)
    writer.record("turn", 1001.0, 1002.0, group=1)
    writer.flush()
    (details,) = [name for name in event_files(tmp_path) if name.stream == "details"]
    os.chmod(details.path(tmp_path), 0)
    details.path(tmp_path).unlink()
    details.path(tmp_path).mkdir()  # whoever opens it fails
    assert [each.name for each in read_events(tmp_path, {"update", "fault"})] == ["update"]
    with pytest.raises(IsADirectoryError):
        list(read_events(tmp_path, {"turn"}))
    with pytest.raises(UndeclaredEvent, match="turns"):
        list(read_events(tmp_path, {"turns"}))


def test_a_run_without_events_and_no_run(tmp_path: Path) -> None:
    assert list(read_events(tmp_path)) == []
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(read_events(tmp_path / "nowhere"))


def test_since_leaves_out_what_ended_before(tmp_path: Path) -> None:
    writer = event_writer(tmp_path, rank_process(0), SimulatedClock())
    for at in range(5):
        writer.record("update", 1000.0 + at, 1000.9 + at, step=at + 1)
    writer.flush()
    assert [each.step for each in read_events(tmp_path, since=UNIX + 2.95)] == [4, 5]


def test_a_resume_marks_what_it_discards(tmp_path: Path) -> None:
    """Two steps beyond the checkpoint, and what had no step after its end, are of no history; what came first is."""
    clock = SimulatedClock()
    first = event_writer(tmp_path, rank_process(0), clock)
    for step in range(1, 5):
        first.record("update", 1000.0 + 10 * step, 1008.0 + 10 * step, step=step)
    first.record("turn", 1015.0, 1016.0, group=1)
    first.record("turn", 1045.0, 1046.0, group=2)
    first.flush()
    clock.now = 1100.0
    second = event_writer(tmp_path, rank_process(0), clock)
    second.record("rolled_back", 1100.0, step=2, args={"since": UNIX + 29.0})
    second.record("update", 1110.0, 1111.0, step=3)
    second.record("turn", 1110.0, 1111.0, group=3)
    second.flush()
    read = {
        (each.name, each.step or each.group, each.begin > UNIX + 90): each.rolled_back for each in read_events(tmp_path)
    }
    assert read == {
        ("update", 1, False): False, ("update", 2, False): False,
        ("update", 3, False): True, ("update", 4, False): True,
        ("turn", 1, False): False, ("turn", 2, False): True, ("rolled_back", 2, True): False,
        ("update", 3, True): False, ("turn", 3, True): False,
    }  # fmt: skip


def test_what_a_rollback_discards() -> None:
    back = Rollback(at=100.0, step=2, since=60.0)
    assert back.discards(70.0, 3) and back.discards(50.0, 3) and not back.discards(70.0, 2)
    assert back.discards(70.0, None) and not back.discards(50.0, None) and not back.discards(101.0, 3)


def test_parts_rotate_and_every_event_is_in_one_of_them(tmp_path: Path) -> None:
    clock = SimulatedClock()
    writer = event_writer(tmp_path, CONTROLLER, clock, most_bytes=1 << 20)
    for number in range(6000):
        clock.now += 20.0
        writer.record("batch_taken", clock.now, step=number)
        if number % 50 == 0:
            writer.flush()
    writer.flush()
    files = [name for name in event_files(tmp_path) if name.stream == "steps"]
    assert len(files) > 3 and [name.number for name in files] == list(range(len(files)))
    read = [each.step for each in read_events(tmp_path, {"batch_taken"})]
    assert read == list(range(6000)) and not writer.lost
