"""Processes that are stopped for a long time, with real processes and a fake clock."""

import signal
import subprocess

from megarl.cluster.nodes.processes import LOOK_S, StoppedProcesses
from megarl.common.process.processes import ProcessId, state_of
from tests.support.waiting import wait_until


def test_a_process_is_found_when_it_was_stopped_at_every_look_for_the_bound() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    stopped, goes_on, sleeps = processes = [ProcessId.of(child.pid) for child in children]
    now = 0.0
    watch = StoppedProcesses(10.0, lambda: now)

    def look(seconds: float) -> list[ProcessId]:
        nonlocal now
        now += seconds
        assert watch.is_due()
        found = watch.find(processes)
        assert not watch.is_due()
        return found

    try:
        for child in children[:2]:
            child.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(stopped) == state_of(goes_on) == "T", 60, "the processes to stop")
        look(LOOK_S)
        assert look(3600.0) == [], "the machine was suspended: that is one look"
        children[1].send_signal(signal.SIGCONT)
        wait_until(lambda: state_of(goes_on) != "T", 60, "the process to go on")
        assert look(LOOK_S) == []
        children[1].send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(goes_on) == "T", 60, "the process to stop again")
        assert [look(LOOK_S) for _ in range(3)] == [[], [], [stopped]]
        assert state_of(sleeps) != "T"
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert look(LOOK_S) == []
