"""The writer of a process: it blocks nobody, counts what is lost, survives the disk, and stays within its bytes."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.telemetry.trace import events
from megarl.telemetry.trace import writer as event_writing
from megarl.telemetry.trace.files import event_files, read_events
from megarl.telemetry.trace.kinds import UndeclaredEvent
from megarl.telemetry.trace.lines import CONTROLLER, FOLDER, rank_process, replica_process
from megarl.telemetry.trace.writer import MOST_WAITING, EventWriter
from tests.support.telemetry.event_runs import SimulatedClock, event_writer
from tests.support.trainer.configs import config


def test_a_thread_writes_what_was_recorded_in_any_thread(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, rank_process(0), 10**8)
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

    monkeypatch.setattr(event_writing.os, "write", slow)
    writer = EventWriter(tmp_path, rank_process(0), 10**9)
    writer.start()
    hangs.set()
    writer.record("fault", time.monotonic(), args={"kind": "engine", "text": "x"})
    assert hung.wait(60), "the thread has not taken it"
    for number in range(MOST_WAITING + 500):
        writer.record("mini_batch", 1.0, 2.0, step=number)  # returns, although the disk does not
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
        patched.setattr(event_writing.os, "write", full)
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


def test_the_newest_events_of_each_stream_are_kept_and_the_oldest_deleted(tmp_path: Path) -> None:
    """Also over starts of the process; faults are not pushed out by what is frequent, nor by other processes."""
    most, clock = 1 << 20, SimulatedClock()
    other = event_writer(tmp_path, replica_process(0), clock, most_bytes=most)
    other.record("paused", clock.now, clock.now + 1, version=1)
    other.flush()
    group = 0
    for start in range(3):
        clock.now += 1.0
        writer = event_writer(tmp_path, CONTROLLER, clock, most_bytes=most)
        writer.record("fault", clock.now, args={"kind": "engine", "text": f"number {start}"})
        for _ in range(40):
            for _ in range(400):
                group += 1
                writer.record("turn", clock.now, clock.now + 1, group=group, args={"turn": 0, "tokens": 9})
            writer.flush()
            own = [path for path in (tmp_path / FOLDER).iterdir() if path.name.startswith(CONTROLLER)]
            assert sum(path.stat().st_size for path in own) <= most * 1.2  # a part is full after its last write
    kept = [each.group for each in read_events(tmp_path, {"turn"})]
    assert kept == list(range(group - len(kept) + 1, group + 1)) and 0 < len(kept) < group
    assert len(list(read_events(tmp_path, {"fault"}))) == 3 and len(list(read_events(tmp_path, {"paused"}))) == 1


def test_an_undeclared_event_is_refused(tmp_path: Path) -> None:
    writer = event_writer(tmp_path, CONTROLLER, SimulatedClock())
    with pytest.raises(UndeclaredEvent, match="no_such_event"):
        writer.record("no_such_event", 1.0)


def test_the_events_of_a_process(tmp_path: Path) -> None:
    events.record("update", 1.0, 2.0)  # nobody writes: nothing happens
    assert events.lost_events() == 0
    events.open_events(config("model").telemetry.events_mib, tmp_path, rank_process(0))
    try:
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
    off = config("model", telemetry__events_mib=0.0)
    events.open_events(off.telemetry.events_mib, tmp_path, rank_process(0))
    events.close_events()
    assert not (tmp_path / FOLDER).exists()
