"""The writer of a process: it blocks nobody, counts what is lost, survives the disk, and stays within its bytes."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.telemetry import event_parts, events
from megarl.telemetry.event_budget import (
    CONTROLLER,
    WritingProcesses,
    rank_process,
    replica_process,
    worker_process,
)
from megarl.telemetry.event_files import event_files, read_events
from megarl.telemetry.event_kinds import UndeclaredEvent
from megarl.telemetry.event_lines import FOLDER
from megarl.telemetry.event_writer import MOST_WAITING, EventWriter
from tests.support.configs import config
from tests.support.event_runs import UNIX, SimulatedClock, event_writer


def test_a_thread_writes_what_was_recorded_in_any_thread(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, rank_process(0), WritingProcesses(1, 1), 10**8)
    writer.start()

    def record(thread: int) -> None:
        for number in range(200):
            now = time.monotonic()
            writer.record("mini_batch", now, now + 1, step=thread, args={"samples": number})

    threads = [threading.Thread(target=record, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(10.0)
    found = list(read_events(tmp_path))
    assert writer.lost == 0 and len(found) == 800
    for thread in range(4):
        assert [each.args["samples"] for each in found if each.step == thread] == list(range(200))


def test_a_disk_that_hangs_delays_nobody_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, hung, goes_on = threading.Event(), threading.Event(), threading.Event()
    write = os.write

    def slow(file: int, data: Any) -> int:
        if hangs.is_set():
            hung.set()
            assert goes_on.wait(300)
        return write(file, data)

    monkeypatch.setattr(event_parts.os, "write", slow)
    writer = EventWriter(tmp_path, rank_process(0), WritingProcesses(1, 1), 10**9)
    writer.start()
    hangs.set()
    writer.record("fault", time.monotonic(), args={"kind": "engine", "text": "x"})
    assert hung.wait(60), "the thread has not taken it"
    for number in range(MOST_WAITING + 500):
        writer.record("mini_batch", 1.0, 2.0, step=number)
    assert writer.lost == 500
    assert not writer.close(0.1), "closing has a bound too"
    goes_on.set()
    assert writer.close(60.0)
    lost = [each.args["count"] for each in read_events(tmp_path, {"events_lost"})]
    kept = [each.step for each in read_events(tmp_path, {"mini_batch"})]
    assert lost == [500] and kept == list(range(MOST_WAITING))


def test_a_full_disk_costs_what_it_does_not_take_and_nothing_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes a part of a line: the next line is whole, and the torn one is left out."""
    writer = event_writer(tmp_path, rank_process(0), SimulatedClock())
    writer.record("update", 1001.0, 1002.0, step=1)
    writer.flush()
    write = os.write
    left = [20]

    def full(file: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "full")
        taken = write(file, bytes(data)[: left[0]])
        left[0] -= taken
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(event_parts.os, "write", full)
        writer.record("update", 1003.0, 1004.0, step=2)
        writer.record("update", 1004.0, 1005.0, step=3)
        writer.flush()
    writer.record("update", 1005.0, 1006.0, step=4)
    writer.flush()
    assert [each.step for each in read_events(tmp_path, {"update"})] == [1, 4]
    assert writer.lost == 2
    assert [each.args["count"] for each in read_events(tmp_path, {"events_lost"})] == [2]


def test_a_moved_folder_is_followed_by_a_new_file(tmp_path: Path) -> None:
    """A new run in the directory moves the events of the one before aside, under a pool that lives on."""
    writer = event_writer(tmp_path, replica_process(0), SimulatedClock())
    writer.record("paused", 1001.0, 1002.0, version=1)
    writer.flush()
    (tmp_path / FOLDER).rename(tmp_path / "before")
    writer.record("paused", 1003.0, 1004.0, version=2)
    writer.flush()
    assert [each.version for each in read_events(tmp_path)] == [2]


def test_two_processes_of_one_name_and_moment_write_no_common_file(tmp_path: Path) -> None:
    clock = SimulatedClock()
    for number in (1, 2):
        writer = event_writer(tmp_path, replica_process(0), clock)
        writer.record("paused", 1001.0, 1002.0, version=number)
        writer.flush()
    assert len(event_files(tmp_path)) == 2
    assert sorted(each.version or 0 for each in read_events(tmp_path)) == [1, 2]


def test_what_has_a_key_is_left_out_when_space_is_short_and_the_rest_says_for_how_many_it_stands(
    tmp_path: Path,
) -> None:
    clock = SimulatedClock()
    writer = event_writer(tmp_path, CONTROLLER, clock, budget=8 << 20)
    for group in range(40_000):
        clock.now += 0.01
        for name in ("turn", "reward"):
            writer.record(name, clock.now, clock.now + 0.5, key=group, group=group, sample=0)
        if group % 100 == 0:
            writer.flush()
    writer.flush()
    found = list(read_events(tmp_path, {"turn", "reward"}))
    turns = {each.group for each in found if each.name == "turn"}
    rewards = {each.group for each in found if each.name == "reward"}
    assert 1000 < len(turns) < 20_000 and writer.lost == 0
    assert len(turns ^ rewards) <= 12, "a group is kept or left out as a whole"
    assert sum(each.one_in for each in found) == pytest.approx(80_000, rel=0.15)


@pytest.mark.parametrize(("step_s", "rate"), [(5.0, 20), (60.0, 200)])
def test_a_simulated_day_stays_within_the_budget(tmp_path: Path, step_s: float, rate: int) -> None:
    """At every minute of 26 hours; a small budget, so that the deletion of old files has to work too.

    All faults are there, and the phases of the newest steps.
    """
    budget, hours = 8 << 20, 26
    processes = WritingProcesses(2, 2, 1)
    clock = SimulatedClock()
    parts = [rank_process(0), rank_process(1), replica_process(0), replica_process(1), worker_process(0), CONTROLLER]
    writers = {name: event_writer(tmp_path, name, clock, budget=budget, processes=processes) for name in parts}
    step = group = faults = 0
    largest = 0
    for minute in range(60 * hours):
        clock.now += 60.0
        for _ in range(int(60 / step_s)):
            step += 1
            for name in parts[:2]:
                for phase in ("generate", "update", "sync", "step"):
                    writers[name].record(phase, clock.now, clock.now + 0.3, key=step, step=step)
            for name in parts[2:4]:
                writers[name].record("paused", clock.now, clock.now + 0.1, key=step, version=step, replica=0)
        for _ in range(rate):
            group += 1
            for name in (parts[4], CONTROLLER):
                writers[name].record(
                    "trajectory", clock.now, clock.now + 5.0, key=group, group=group, sample=1,
                    args={"turns": 3, "tokens": 1234, "queue_s": 0.1234, "decode_s": 2.3456},
                )  # fmt: skip
        if minute % 60 == 0:
            faults += 1
            writers[CONTROLLER].record("fault", clock.now, args={"kind": "engine", "text": f"number {faults}"})
        for writer in writers.values():
            writer.flush()
        there = sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir())
        largest = max(largest, there)
        assert there <= budget, f"minute {minute}"
    assert largest > budget / 3, "the space is used"
    assert len([*read_events(tmp_path, {"fault"})]) == faults and sum(each.lost for each in writers.values()) == 0
    newest = {each.step for each in read_events(tmp_path, {"update"}) if each.process == parts[0]}
    assert max(newest) > step - 64


def test_processes_that_are_started_again_and_again_stay_within_the_budget(tmp_path: Path) -> None:
    """Each start may write its part at once, so only the deletion of what others have left keeps the bound."""
    budget, clock = 8 << 20, SimulatedClock()
    for start in range(60):
        writer = event_writer(tmp_path, CONTROLLER, clock, budget=budget)
        for _ in range(3):
            for group in range(3000):
                writer.record("turn", clock.now, clock.now + 1, key=group, group=group, args={"turn": 0, "tokens": 9})
            clock.now += 70.0
            writer.flush()
        there = sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir())
        assert there <= budget, f"after start {start}"
    first = min(name.start_ms for name in event_files(tmp_path))
    assert first > round(UNIX * 1000), "nothing had to be deleted"


def test_an_undeclared_event_is_refused(tmp_path: Path) -> None:
    writer = event_writer(tmp_path, CONTROLLER, SimulatedClock())
    with pytest.raises(UndeclaredEvent, match="no_such_event"):
        writer.record("no_such_event", 1.0)


def test_the_events_of_a_process(tmp_path: Path) -> None:
    events.record("update", 1.0, 2.0)  # nobody writes: nothing happens
    assert not events.are_wanted("turn", 0) and events.lost_events() == 0
    events.open_events(config("model"), tmp_path, rank_process(0))
    try:
        assert events.are_wanted("turn", 0)
        with events.span("update", step=4):
            events.fault("engine", "y" * 9999, replica=3)
        events.recovery("engine", "back", replica=3)
        with pytest.raises(UndeclaredEvent, match="toaster"):
            events.fault("toaster", "burnt")
        with pytest.raises(ZeroDivisionError), events.span("save"):
            1 / 0
    finally:
        events.close_events()
    found = {each.name: each for each in read_events(tmp_path)}
    assert found.keys() == {"update", "fault", "recovery", "save"}
    assert len(str(found["fault"].args["text"])) == events.MAX_CHARACTERS and found["fault"].replica == 3
    assert abs(found["recovery"].begin - time.time()) < 60
    assert found["update"].begin <= found["fault"].begin <= found["update"].end


def test_events_can_be_switched_off(tmp_path: Path) -> None:
    off = config("model", telemetry__events__enabled=False)
    events.open_events(off, tmp_path, rank_process(0))
    assert not events.are_wanted("turn", 0)
    events.close_events()
    assert not (tmp_path / FOLDER).exists()
