"""The questions to admission and its decisions, recorded as the events happen."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.admission_log import Event, ScheduleFile
from tests.support.machines.schedule_replay import ScheduleMismatch, read_schedule, replay_schedule


def test_events_are_recorded_in_their_order_and_only_if_they_change_something() -> None:
    events: list[Event] = []
    admission = Admission(1, Pace(), refill=1, record=events.append)
    admission.load_state_dict(admission.state_dict(), attempts=2)
    admission.announce(0)
    assert admission.admit() == [] and admission.batch(0) is None
    admission.set_version(0)
    assert admission.admit() == [0] and admission.replace(0, {0}) and admission.admit() == [1]
    assert not admission.replace(1, {0})
    with pytest.raises(ValueError, match="not in flight"):
        admission.finish(0, True)
    admission.finish(1, False, {0})
    assert admission.batch(0) == admission.batch(0) == ([], [1])
    with pytest.raises(ValueError, match="do not account"):
        admission.commit(0, trained=1, filtered=0, dropped_stale=0, failed=0)
    admission.commit(0, trained=0, filtered=1, dropped_stale=0, failed=1)
    begin, *others = json.loads(json.dumps(events))
    pace = {"updates_per_step": 1, "sync_interval": 1, "max_staleness": 0, "in_turns": False}
    settings = {"groups": 1, "refill": 1, "steps": None, "pace": pace, "attempts": 2}
    assert begin == {"event": "begin", **settings, "state": Admission(1, Pace()).state_dict()}
    assert others == [
        {"event": "announce", "version": 0},
        {"event": "set_version", "version": 0},
        {"event": "admit", "groups": [0]},
        {"event": "replace", "group": 0, "versions": [0]},
        {"event": "admit", "groups": [1]},
        {"event": "finish", "group": 1, "ok": False, "versions": [0]},
        {"event": "batch", "step": 0, "ok": [], "failed": [1], "replaced": [0]},
        {"event": "commit", "step": 0, "trained": 0, "filtered": 1, "dropped_stale": 0, "failed": 1},
    ]


def train_group_0_twice() -> list[Event]:
    """Two steps of two groups; the second one is filled up with the first group."""
    events: list[Event] = []
    admission = Admission(2, Pace(max_staleness=3), max_uses=2, record=events.append)
    admission.load_state_dict(admission.state_dict())
    admission.set_version(0)
    admission.admit()
    for group in (0, 1, 2):
        admission.finish(group, True, {0})
    admission.batch(0)
    admission.commit(0, trained=2, filtered=0, dropped_stale=0, failed=0, trained_groups=[1, 0])
    admission.batch(1)
    admission.commit(1, trained=1, filtered=0, dropped_stale=0, failed=0, reused=1, trained_groups=[2])
    return json.loads(json.dumps(events))


def test_further_uses_of_groups_are_recorded_and_replayed() -> None:
    begin, *events = train_group_0_twice()
    assert begin["max_uses"] == 2
    assert events[-2:] == [
        {"event": "batch", "step": 1, "ok": [2], "failed": [], "replaced": [], "reused": [0]},
        {
            "event": "commit", "step": 1, "trained": 1, "filtered": 0, "dropped_stale": 0, "failed": 0,
            "reused": 1, "trained_groups": [2],
        },
    ]  # fmt: skip
    found = replay_schedule([begin, *events])
    assert {step: (each.ok, each.reused) for step, each in found.items()} == {0: ([0, 1], []), 1: ([2], [0])}


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (-2, {"reused": [1]}, r"event 9 .*groups that step 1 uses again: recorded \[1\], replayed \[0\]"),
        (-2, {"reused": []}, "event 9 .*groups that step 1 uses again"),
        (-1, {"reused": 0}, "event 10 .*took 1 groups to train them again, not 0"),
        (-1, {"trained_groups": [0]}, "event 10 .*cannot be its 1 trained groups"),
        (0, {"max_uses": 1}, "event 3 .*groups that start"),
    ],
)
def test_other_uses_than_those_of_the_schedule_are_found(index: int, change: Event, message: str) -> None:
    events = train_group_0_twice()
    events[index] |= change
    with pytest.raises(ScheduleMismatch, match=message):
        replay_schedule(events)


def test_a_file_that_a_killed_process_has_left_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path)
    file.write({"event": "announce", "version": 0})
    assert [event["version"] for event in read_schedule(path)] == [0], "an event is in the file at once"
    with path.open("a") as torn:
        torn.write('{"event":"announce","ver')
    assert [event["version"] for event in read_schedule(path)] == [0]
    another = ScheduleFile(path)
    another.write({"event": "announce", "version": 1})
    another.close()
    path.rename(tmp_path / "moved aside")
    another.write({"event": "announce", "version": 2})
    assert [event["version"] for event in read_schedule(tmp_path / "moved aside")] == [0, 1]
    assert [event["version"] for event in read_schedule(path)] == [2]


def test_nothing_is_written_after_an_event_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would follow a torn line, and no reader could tell where the torn one ends."""
    path = tmp_path / "schedule.jsonl"
    file = ScheduleFile(path)
    file.write({"event": "announce", "version": 0})
    assert file._file is not None

    def full(text: str) -> int:
        raise OSError("no space left")

    real = file._file
    monkeypatch.setattr(file, "_file", SimpleNamespace(write=full, close=real.close))
    with pytest.raises(OSError, match="no space"):
        file.write({"event": "announce", "version": 1})
    monkeypatch.setattr(file, "_file", real)
    with pytest.raises(OSError, match="an earlier event could not be written"):
        file.write({"event": "announce", "version": 2})
    file.close()
    file.write({"event": "announce", "version": 3})
    assert [event["version"] for event in read_schedule(path)] == [0, 3]


@pytest.mark.parametrize("line", ['{"event":"announce"', '{"event":"begun"}', "[1]", "{}", ""])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_text('{"event":"announce","version":0}\n' + line + "\n")
    with pytest.raises(ScheduleMismatch, match=r"schedule.jsonl, line 2: no event of a schedule"):
        read_schedule(path)
