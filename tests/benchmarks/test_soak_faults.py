"""Faults: their schedule, which processes they hit, what a signal does, and what a run makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import soak_faults
from benchmarks.soak_faults import (
    KINDS,
    Fault,
    Happened,
    Injector,
    Replica,
    cpu_seconds,
    find_replicas,
    hold,
    is_stopped,
    lethal,
    missing,
    processes_left,
    read_so_far,
    schedule,
    throttle,
)
from tests.support.waiting import wait_until

WANTED = [("kill", "engine"), ("hang", "replica"), ("pause", "engine"), ("slow", "replica")]


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_has_each_wanted_fault_once_in_the_order_of_its_steps(seed: int) -> None:
    faults = schedule(seed, WANTED, replicas=2, first=3, last=60)
    assert Counter((fault.kind, fault.target) for fault in faults) == Counter(WANTED)
    steps = [fault.after_step for fault in faults]
    assert steps == sorted(steps) and steps[0] == 3 and steps[-1] < 60
    for fault in faults:
        low, high = KINDS[fault.kind].seconds
        assert low <= fault.seconds <= high and fault.replica in (0, 1) and 0 <= fault.delay_s <= 1


def test_a_schedule_depends_on_its_seed_alone() -> None:
    schedules = [schedule(seed, WANTED, replicas=2, first=3, last=60) for seed in (0, 0, 1, 2)]
    assert schedules[0] == schedules[1]
    assert len({str(each) for each in schedules}) == 3


def test_a_hang_gets_more_steps_than_a_pause() -> None:
    faults = schedule(0, WANTED, replicas=2, first=0, last=120)
    ends = [*(fault.after_step for fault in faults[1:]), 120]
    room = {fault.kind: end - fault.after_step for fault, end in zip(faults, ends, strict=True)}
    assert room["hang"] > room["kill"] > room["slow"] > room["pause"] >= 9


def test_mistakes_in_a_schedule_are_told() -> None:
    with pytest.raises(ValueError, match=r"unknown faults: \['freeze'\]"):
        schedule(0, [("freeze", "engine")], replicas=2, first=3, last=60)
    with pytest.raises(ValueError, match="not 3 to 3"):
        schedule(0, WANTED, replicas=2, first=3, last=3)


# --- signals, on a process that computes

BUSY = "while True: pass"


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    started = subprocess.Popen([sys.executable, "-c", BUSY])
    yield psutil.Process(started.pid)
    started.kill()
    started.wait(10)


def test_a_held_process_stands_still_and_goes_on(process: psutil.Process) -> None:
    wait_until(lambda: cpu_seconds(process) > 0.05, 30, "the process to compute")
    seen: list[bool] = []
    used: list[float] = []

    def look() -> bool:
        seen.append(is_stopped([process]))
        used.append(cpu_seconds(process))
        return False

    assert 0.6 <= hold([process], 0.6, look) < 5
    assert seen and all(seen) and used[0] == used[-1]
    wait_until(lambda: cpu_seconds(process) > used[-1], 30, "the process to go on")


def test_a_hold_ends_early(process: psutil.Process) -> None:
    assert hold([process], 60.0, lambda: True) < 10
    assert not is_stopped([process])


def test_a_process_that_has_ended_was_not_held(process: psutil.Process) -> None:
    process.kill()
    process.wait(10)
    assert hold([process], 5.0, lambda: False) == 0.0
    assert throttle([process], 0.5, lambda: False) == 0.0
    assert cpu_seconds(process) == 0.0 and not is_stopped([process])


def test_a_throttled_process_is_mostly_stopped(process: psutil.Process) -> None:
    begun = time.monotonic()
    stopped = throttle([process], 2.0, lambda: False)
    assert stopped > 0.5 * (time.monotonic() - begun)
    wait_until(lambda: not is_stopped([process]), 10, "the process to go on")


# --- finding the processes of a run


def test_replicas_are_found_by_the_log_that_they_write_to(tmp_path: Path) -> None:
    """A supervisor over an actor, which has an engine and another child; an actor without an engine is not ready."""
    children = "(exec -a VLLM::EngineCore sleep 600) & (exec -a tracker sleep 600) & wait"
    script = f"""
        (exec -a ray::EngineReplica.generate bash -c '{children}' >> {tmp_path}/replica-1.log) &
        (exec -a ray::EngineReplica sleep 600 >> {tmp_path}/replica-0.log) &
        (exec -a ray::RolloutController bash -c '{children}' >> {tmp_path}/controller.log) &
        wait
    """
    assert find_replicas(tmp_path) == {}
    supervisor = psutil.Popen(["bash", "-c", script])
    try:
        (tmp_path / "supervisor.json").write_text(json.dumps({"process": {"pid": supervisor.pid, "start_time": 0}}))
        wait_until(lambda: set(find_replicas(tmp_path)) == {1}, 60, "the engine of replica 1")
        replica = find_replicas(tmp_path)[1]
        assert replica.engine.ppid() == replica.actor.pid and replica.actor.ppid() == supervisor.pid
        assert "EngineCore" in replica.engine.cmdline()[0]
        fault = Fault("kill", "engine", 1, 0, 0.0, 0.0)
        assert replica.hit_by(fault) == [replica.engine]
        both = Fault("hang", "replica", 1, 0, 0.0, 1.0)
        assert replica.hit_by(both) == [replica.actor, replica.engine]
    finally:
        for each in [*supervisor.children(recursive=True), supervisor]:
            each.kill()
        supervisor.wait(10)


def test_processes_that_a_run_has_left_are_found_by_their_logs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    places = (tmp_path / "run" / "replica-0.log", tmp_path / "run.log", tmp_path / "other.log")
    started = [psutil.Popen(["sleep", "600"], stdout=place.open("w")) for place in places]
    try:
        found = processes_left(tmp_path / "run", 0.1)
        assert sorted(found) == sorted(f"sleep (pid {each.pid})" for each in started[:2])
    finally:
        for each in started:
            each.kill()
            each.wait(10)
    assert processes_left(tmp_path / "run", 10) == []


def test_a_line_that_is_being_written_is_no_step(tmp_path: Path) -> None:
    assert read_so_far(tmp_path) == []
    done = json.dumps({"step": 1, "time/step": 1.0})
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "eval/n": 1}}\n{done}\n{{"step": 2, "time/st')
    assert read_so_far(tmp_path) == [{"step": 1, "time/step": 1.0}]


# --- the injector, on a run of which only the files are there


class Run:
    """Two replicas that are processes, and a metrics.jsonl to which steps are added."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.replicas = {index: self.start() for index in range(2)}
        monkeypatch.setattr(soak_faults, "find_replicas", self.find)
        monkeypatch.setattr(soak_faults, "POLL_S", 0.02)
        self.steps = 0

    def start(self) -> Replica:
        engine = psutil.Popen([sys.executable, "-c", BUSY])
        return Replica(actor=engine, engine=engine)

    def find(self, run_dir: Path) -> dict[int, Replica]:
        return {index: each for index, each in self.replicas.items() if self.alive(each.engine)}

    @staticmethod
    def alive(process: psutil.Process) -> bool:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    def step(self, **metrics: float) -> None:
        self.steps += 1
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.steps, "time/step": 1.0, **metrics}) + "\n")

    def close(self) -> None:
        for each in self.replicas.values():
            os.kill(each.engine.pid, signal.SIGCONT)
            each.engine.kill()
            each.engine.wait(10)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    living = Run(tmp_path, monkeypatch)
    yield living
    living.close()


def test_a_killed_engine_is_over_when_a_publication_has_replaced_it(run: Run) -> None:
    said: list[str] = []
    old = run.replicas[1]
    injector = Injector(run.directory, [Fault("kill", "engine", 1, 1, 0.0, 0.0)], replicas=2, say=said.append)
    time.sleep(0.2)
    assert not injector.happened, "it came before its step"
    run.step()
    wait_until(lambda: not run.alive(old.engine), 30, "the kill")
    run.replicas[1] = run.start()
    run.step()
    time.sleep(0.3)
    assert not injector.happened[0].over, "no restart was told"
    run.step(**{"sync/restarted_replicas": 1})
    wait_until(lambda: injector.happened[0].over, 10, "the end of the fault")
    assert injector.stop() == ""
    assert "2 steps later; 1 replicas restarted" in str(injector.happened[0]) and injector.happened[0].busy
    assert any("kill the engine of replica 1" in each for each in said)


def test_a_pause_is_over_when_the_same_engine_goes_on(run: Run) -> None:
    run.step()
    injector = Injector(
        run.directory, [Fault("pause", "engine", 0, 1, 0.0, 0.5)], replicas=2, say=lambda text: None
    )  # fmt: skip
    wait_until(lambda: is_stopped([run.replicas[0].engine]), 30, "the pause")
    wait_until(lambda: not is_stopped([run.replicas[0].engine]), 30, "its end")
    time.sleep(0.1)
    assert not injector.happened[0].over, "the run has made no step"
    for _ in range(3):
        run.step()
        time.sleep(0.1)
    wait_until(lambda: injector.happened[0].over, 10, "the end of the fault")
    assert injector.stop() == ""
    assert "the same engine goes on; 0 replicas restarted" in str(injector.happened[0])


def test_a_pause_that_costs_a_replica_is_not_over(run: Run) -> None:
    run.step()
    injector = Injector(
        run.directory, [Fault("pause", "engine", 0, 1, 0.0, 0.2)], replicas=2, say=lambda text: None
    )  # fmt: skip
    wait_until(lambda: bool(injector.happened), 30, "the pause")
    time.sleep(0.5)
    for _ in range(3):
        run.step(**{"sync/restarted_replicas": 1})
        time.sleep(0.1)
    wait_until(lambda: "restarted" in str(injector.happened[0]), 10, "the end of the fault")
    assert injector.stop() == ""
    assert not injector.happened[0].over and "NOT OVER" in str(injector.happened[0])


def test_the_end_of_the_run_ends_the_faults_and_lets_stopped_processes_go_on(run: Run) -> None:
    run.step()
    faults = [Fault("hang", "replica", 0, 1, 0.0, 600.0), Fault("kill", "engine", 1, 1, 0.0, 0.0)]
    injector = Injector(run.directory, faults, replicas=2, say=lambda text: None)
    wait_until(lambda: is_stopped([run.replicas[0].engine]), 30, "the hang")
    assert injector.stop() == ""
    wait_until(lambda: not is_stopped([run.replicas[0].engine]), 10, "the process to go on")
    assert [each.over for each in injector.happened] == [False]
    assert run.alive(run.replicas[1].engine)
    assert missing(faults, injector.happened) == ["hang replica", "kill engine"]


def test_what_goes_wrong_in_the_thread_of_the_faults_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run_dir: Path) -> dict[int, Replica]:
        raise psutil.AccessDenied(7)

    run.step()
    monkeypatch.setattr(soak_faults, "find_replicas", broken)
    injector = Injector(run.directory, [Fault("kill", "engine", 0, 1, 0.0, 0.0)], replicas=2, say=lambda text: None)
    wait_until(lambda: injector._error is not None, 30, "the error")
    assert "the faults: psutil.AccessDenied(pid=7" in injector.stop()


def test_a_thread_of_the_faults_that_does_not_end_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(soak_faults, "STOP_S", 0.1)
    injector = Injector(
        run.directory, [Fault("kill", "engine", 0, 0, 0.0, 0.0)], replicas=2, say=lambda text: bool(go.wait(60))
    )  # fmt: skip
    wait_until(lambda: bool(injector.happened), 30, "the fault")
    assert injector.stop() == "the faults: waited 0 s for their thread to end"
    go.set()


def test_missing_and_lethal() -> None:
    faults = [Fault(kind, target, 0, 1, 0.0, 1.0) for kind, target in WANTED]  # type: ignore[arg-type]
    happened = [Happened(fault, pid=1, step=1, at_s=0.0, over=fault.kind != "slow") for fault in faults]
    assert missing(faults, happened) == ["slow replica"]
    assert [each.fault.kind for each in lethal(happened)] == ["kill", "hang"]
