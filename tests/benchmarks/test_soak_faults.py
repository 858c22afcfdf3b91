"""Faults: their schedule, which processes they hit, what a signal does, and what a run makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import soak_faults, soak_processes
from benchmarks.soak_faults import Injector
from benchmarks.soak_happened import Happened, lethal, longest_gap
from benchmarks.soak_kinds import ALWAYS, KINDS, draw, missing, schedule
from benchmarks.soak_orders import SLOWER
from benchmarks.soak_plan import FAULTS_SHARE
from benchmarks.soak_processes import (
    TITLES,
    Replica,
    cpu_seconds,
    ended,
    find_agent,
    find_processes,
    find_replicas,
    hold,
    is_stopped,
    processes_left,
    restarts_among,
    throttle,
)
from benchmarks.soak_variant import orders_of
from benchmarks.soak_watch import WENT_ON, read_so_far
from tests.support.faulted_run import BUSY, Run, fault_of
from tests.support.waiting import wait_until

WANTED = ["kill-engine", "hang-replica", "pause-engine", "slow-engine"]


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_has_each_wanted_fault_once_in_the_order_of_its_steps(seed: int) -> None:
    faults = schedule(seed, WANTED, replicas=2, first=3, last=60)
    assert Counter(fault.kind.name for fault in faults) == Counter(WANTED)
    steps = [fault.after_step for fault in faults]
    assert steps == sorted(steps) and steps[0] == 3 and steps[-1] < 60
    for fault in faults:
        low, high = fault.kind.seconds
        assert low <= fault.seconds <= high and fault.index in (0, 1) and 0 <= fault.delay_s <= 1


def test_a_schedule_depends_on_its_seed_alone() -> None:
    schedules = [schedule(seed, WANTED, replicas=2, first=3, last=60) for seed in (0, 0, 1, 2)]
    assert schedules[0] == schedules[1]
    assert len({str(each) for each in schedules}) == 3


def test_a_hang_gets_more_steps_than_a_pause() -> None:
    faults = schedule(0, WANTED, replicas=2, first=0, last=120)
    ends = [*(fault.after_step for fault in faults[1:]), 120]
    room = {fault.kind.action: end - fault.after_step for fault, end in zip(faults, ends, strict=True)}
    assert room["hang"] > room["kill"] > room["slow"] > room["pause"] >= 9


LEAST_S = {names: min(KINDS[name].cost_s for name in names) for names in map(frozenset, ALWAYS)}


@pytest.mark.parametrize("seconds", [0.0, 100.0, 400.0, 10_000.0])
def test_faults_are_drawn_from_the_whole_table_as_far_as_the_time_goes(seconds: float) -> None:
    drawn = [draw(seed, seconds, without=["fill-disk"]) for seed in range(400)]
    for names in drawn:
        assert len(set(names)) == len(names) and sum(KINDS[name].cost_s for name in names) <= seconds
        left = seconds - sum(KINDS[name].cost_s for name in names)
        assert all(kind.cost_s > left for name, kind in KINDS.items() if name not in (*names, "fill-disk"))

    def room(name: str) -> float:
        return seconds - sum(cost for names, cost in LEAST_S.items() if name not in names)

    possible = {name for name, kind in KINDS.items() if kind.cost_s <= room(name)} - {"fill-disk"}
    assert {name for names in drawn for name in names} == possible
    assert drawn == [draw(seed, seconds, without=["fill-disk"]) for seed in range(400)]


ALONE = [name for name, kind in KINDS.items() if kind.needs_hosts]
TOGETHER = [name for name, kind in KINDS.items() if not kind.happens_on_hosts]
ENGINES = [
    {"kill-engine", "kill-engine-idle", "kill-engine-in-sync", "kill-replica"},
    {"hang-engine", "hang-engine-in-sync", "hang-replica", "pause-engine", "pause-replica"},
    {"slow-engine", "crawl-engine"},
]


@pytest.mark.parametrize(
    ("minutes", "without", "always"),
    [
        (20.0, ALONE, ENGINES),
        (5.0, ALONE, ENGINES),
        (20.0, TOGETHER, [{"kill-engine"}, {"pause-engine"}]),  # no engine of a host is slowed down
        (20.0, [*ENGINES[0], *ENGINES[1]], ENGINES[2:]),
        (3.5, ALONE, [{"pause-engine", "pause-replica"}, {"slow-engine"}]),  # a kill takes longer than what is left
        (1.5, ALONE, [{"pause-engine", "pause-replica"}]),
    ],
)
def test_a_draw_always_has_one_kill_one_stop_and_one_slow_engine(
    minutes: float, without: list[str], always: list[set[str]]
) -> None:
    """It has each of them for which there is time, and of which a kind can happen there."""
    seconds = FAULTS_SHARE * 60.0 * minutes
    for seed in range(1000):
        names = draw(seed, seconds, without)
        assert not set(names) & set(without) and sum(KINDS[name].cost_s for name in names) <= seconds
        assert all(wanted.intersection(names) for wanted in always), f"seed {seed}: {names}"


def test_which_kill_which_stop_and_which_slow_engine_a_draw_has_the_seed_says() -> None:
    firsts = [draw(seed, FAULTS_SHARE * 60.0 * 20.0, ALONE)[: len(ENGINES)] for seed in range(1000)]
    found = Counter(name for names in firsts for name in names)
    assert all(min(found[name] for name in names) > 500 / len(names) for names in ENGINES)
    assert found.total() == 3000 and found.keys() == set.union(*ENGINES)


@pytest.mark.parametrize("seed", range(20))
def test_a_fault_of_the_end_comes_after_the_last_step_and_after_all_others(seed: int) -> None:
    faults = schedule(seed, ["limit-evaluation", *WANTED], replicas=2, first=3, last=60, end=80)
    assert [fault.kind.at_end for fault in faults] == [False] * len(WANTED) + [True]
    assert (faults[-1].after_step, faults[-1].delay_s) == (80, 0.0)
    assert all(fault.after_step < 60 for fault in faults[:-1])
    (alone,) = schedule(seed, ["limit-evaluation"], replicas=2, first=3, last=60)
    assert alone.after_step == 60


def test_mistakes_in_a_schedule_are_told() -> None:
    with pytest.raises(ValueError, match="unknown faults: freeze-engine; known are abort-job, add-replica, "):
        schedule(0, ["freeze-engine"], replicas=2, first=3, last=60)
    with pytest.raises(ValueError, match="not 3 to 3"):
        schedule(0, WANTED, replicas=2, first=3, last=3)


# --- signals, on a process that computes


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

    assert 2.0 <= hold([process], 2.0, look) < 10
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
    finally:
        for each in [*supervisor.children(recursive=True), supervisor]:
            each.kill()
        supervisor.wait(10)


def test_the_other_parts_of_a_run_are_found_by_their_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor over a reward worker, controller and queue; torchrun's agent over a rank and another child."""
    titles = {target: title for target, title in TITLES.items() if target != "agent-worker"}
    parts = " ".join(f"(exec -a 'python -m {title}.x' sleep 600) &" for title in titles.values())
    rank = "TORCHELASTIC_RESTART_COUNT=3 TORCHELASTIC_MAX_RESTARTS=5 bash -c 'exec -a train_rl.py sleep 600'"
    supervisor = psutil.Popen(["bash", "-c", f"{parts} wait"])
    agent = psutil.Popen(["bash", "-c", f"{rank} & sleep 600 & wait", "torch.distributed.run"])
    other = psutil.Popen(["sleep", "600"], stdout=(tmp_path / "guardian.log").open("w"))
    monkeypatch.setattr(soak_processes, "STARTED_S", 0.0)
    pids = {"process": {"pid": supervisor.pid}, "agent": {"pid": agent.pid}}
    try:
        assert find_processes(tmp_path, "job") == [] and find_agent(tmp_path) is None
        (tmp_path / "supervisor.json").write_text(json.dumps(pids))
        for target in (*titles, "rank"):
            wait_until(lambda target=target: len(find_processes(tmp_path, target)) == 1, 30, f"the {target}")  # type: ignore[misc]
        assert find_processes(tmp_path, "agent") == [agent] == [find_agent(tmp_path)]
        wait_until(lambda: restarts_among(find_processes(tmp_path, "rank")) == (3, 2), 30, "the rank's environment")
        monkeypatch.setattr(soak_processes, "STARTED_S", 600.0)
        assert find_processes(tmp_path, "reward") == [], "it is being started"
        job = find_processes(tmp_path, "job")
        expected = {supervisor.pid, agent.pid, other.pid, *(p.pid for p in supervisor.children() + agent.children())}
        assert {each.pid for each in job} == expected and not ended(job)
        for each in job:
            each.kill()
        wait_until(lambda: ended(job), 30, "the end of the job")
        assert find_agent(tmp_path) is None and find_processes(tmp_path, "rank") == []
        assert restarts_among([]) is None
    finally:
        for each in (supervisor, agent, other):
            for child in (*each.children(recursive=True), each):
                child.kill()
            each.wait(10)


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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    living = Run(tmp_path, monkeypatch)
    yield living
    living.close()


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines count as working, also on a machine that leaves them little time (test_soak_moments.py looks at them)."""
    monkeypatch.setattr("soak_replica_faults.catch", lambda *args: True)


@pytest.mark.usefixtures("working")
def test_a_killed_engine_is_over_when_a_publication_has_replaced_it_and_its_responses_are_trained(run: Run) -> None:
    said: list[str] = []
    old = run.replicas[1]
    injector = Injector(run.directory, [fault_of("kill-engine", 1)], replicas=2, say=said.append)
    time.sleep(0.2)
    assert not injector.happened, "it came before its step"
    run.step()
    wait_until(lambda: not run.alive(old.engine), 30, "the kill")
    run.replicas[1] = run.start()
    run.step()
    time.sleep(0.3)
    assert not injector.happened[0].over, "no restart was told"
    run.step(**{"sync/restarted_replicas": 1, "rollout/replicas_alive": 2})
    wait_until(lambda: injector.happened[0].over, 10, "the new engine")
    time.sleep(0.3)
    assert not any("1 replicas restarted" in each for each in said), "no response was continued yet"
    run.step(**{"rollout/continued": 7})
    wait_until(lambda: any("2 steps later; 1 replicas restarted" in each for each in said), 10, "the end of the fault")
    assert injector.stop() == "" and injector.happened[0].over
    assert injector.happened[0].busy and injector.happened[0].continued == 7 and not injector.happened[0].beside
    assert any("kill the engine of replica 1" in each for each in said)


@pytest.mark.usefixtures("working")
def test_an_engine_whose_responses_nobody_continues_is_not_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak_watch.WatchedRun.NOTICE_S", 0.5)
    run.step()
    injector = Injector(run.directory, [fault_of("kill-engine", 1)], replicas=2, say=lambda text: None)
    wait_until(lambda: not run.alive(run.replicas[1].engine), 30, "the kill")
    run.replicas[1] = run.start()
    run.step(**{"sync/restarted_replicas": 1, "rollout/replicas_alive": 2})
    wait_until(lambda: "rollout/continued has NOT counted it" in str(injector.happened), 10, "the end of the fault")
    assert injector.stop() == "" and not injector.happened[0].over


def test_a_pause_is_over_when_the_same_engine_goes_on(run: Run) -> None:
    run.step()
    injector = Injector(
        run.directory, [fault_of("pause-engine", seconds=0.5)], replicas=2, say=lambda text: None
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


@pytest.mark.slow
def test_a_pause_that_costs_a_replica_is_not_over(run: Run) -> None:
    run.step()
    injector = Injector(
        run.directory, [fault_of("pause-engine", seconds=0.2)], replicas=2, say=lambda text: None
    )  # fmt: skip
    wait_until(lambda: bool(injector.happened), 30, "the pause")
    time.sleep(0.5)
    for _ in range(3):
        run.step(**{"sync/restarted_replicas": 1, "rollout/replicas_alive": 2})
        time.sleep(0.1)
    wait_until(lambda: "restarted" in str(injector.happened[0]), 10, "the end of the fault")
    assert injector.stop() == ""
    assert not injector.happened[0].over and "NOT OVER" in str(injector.happened[0])


def survive(run: Run, name: str, recover: Callable[[], None], *, index: int = 1) -> Happened:
    """Kill a worker, `recover` from that, take steps, and return what the injector makes of it."""
    run.step()
    old = run.workers[index]
    injector = Injector(run.directory, [fault_of(name, index)], replicas=2, say=lambda text: None)
    wait_until(lambda: not run.alive(old), 30, "the kill")
    wait_until(lambda: bool(injector.happened), 10, "the note of the fault")
    recover()
    time.sleep(0.2)
    assert not injector.happened[0].over, "no step was done"
    for _ in range(5):
        run.step(**{"rollout/replicas_alive": 2})
        time.sleep(0.1)
    wait_until(lambda: "two more steps" in str(injector.happened[0]), 10, "the end of the fault")
    assert injector.stop() == ""
    return injector.happened[0]


def test_a_killed_part_is_over_when_it_is_there_again_and_the_run_goes_on(run: Run) -> None:
    event = survive(run, "kill-reward", lambda: None)
    assert event.over and "one of 2" in event.notes and "restarted 0 times (0 are allowed), the job 0" in str(event)


@pytest.mark.parametrize(("name", "restarts", "over"), [
    ("kill-reward", 1, False), ("kill-rank", 1, True), ("kill-rank", 2, False), ("kill-queue", 0, True),
    ("kill-controller", 1, False), ("kill-job", 1, False),
])  # fmt: skip
def test_a_fault_may_cost_as_many_restarts_of_the_ranks_as_its_kind_allows(
    run: Run, name: str, restarts: int, over: bool
) -> None:
    def recover() -> None:
        run.restarts = 4 + restarts
        run.workers.append(run.start().engine)

    run.restarts = 4
    assert survive(run, name, recover).over == over


@pytest.mark.parametrize(("name", "over"), [("kill-agent", True), ("kill-job", True), ("kill-rank", False)])
def test_a_fault_may_cost_as_many_starts_of_the_job_as_its_kind_allows(run: Run, name: str, over: bool) -> None:
    def recover() -> None:
        run.agent, run.restarts = psutil.Process(os.getppid()), 0
        run.workers.append(run.start().engine)
        (run.directory / "metrics.jsonl").write_text("")  # a resume goes back

    run.restarts = 3
    event = survive(run, name, recover)
    assert event.over == over and "from step 0 on" in str(event)


def test_a_part_that_does_not_come_back_is_not_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak_watch.WatchedRun.RECOVER_S", 0.3)
    run.step()
    injector = Injector(run.directory, [fault_of("kill-job")], replicas=2, say=lambda text: None)
    wait_until(lambda: "not there again" in str(injector.happened), 30, "the end of the fault")
    assert injector.stop() == "" and not injector.happened[0].over and "all of it" in injector.happened[0].notes
    assert ended(run.workers)


@pytest.mark.slow
def test_a_process_that_is_not_found_at_once_is_looked_for_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine has no title for a moment. The fault is due at the second look; the third one is for its target."""
    looks: list[int] = []

    def find(run_dir: Path) -> dict[int, Replica]:
        looks.append(len(looks))
        return {} if len(looks) in (3, 4) else run.find(run_dir)

    monkeypatch.setattr("soak_place.find_replicas", find)
    run.step()
    injector = Injector(run.directory, [fault_of("kill-engine", 1)], replicas=2, say=lambda text: None)
    wait_until(lambda: bool(injector.happened), 30, "the fault")
    assert injector.stop() == "" and len(looks) > 4


def test_the_disk_is_filled_for_its_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[float] = []
    monkeypatch.setattr("soak_part_faults.fill", lambda run_dir, seconds, until: filled.append(seconds) or seconds)
    run.step()
    injector = Injector(run.directory, [fault_of("fill-disk", seconds=7.0)], replicas=2, say=lambda text: None)
    wait_until(lambda: bool(filled), 30, "the fault")
    run.step()
    time.sleep(0.2)
    assert not injector.happened[0].over
    for _ in range(2):
        run.step()
    wait_until(lambda: injector.happened[0].over, 10, "the end of the fault")
    assert injector.stop() == "" and filled == [7.0] and "full for 7.0 s" in injector.happened[0].notes


@pytest.mark.slow
def test_a_slow_engine_is_over_when_it_is_replaced(run: Run) -> None:
    run.step()
    old = run.replicas[0]
    injector = Injector(run.directory, [fault_of("crawl-engine", seconds=600.0)], replicas=2, say=lambda text: None)
    for stands in (True, False, True):
        wait_until(lambda stands=stands: is_stopped([old.engine]) == stands, 30, "the fault")  # type: ignore[misc]
    old.engine.kill()  # the run drains and replaces it
    old.engine.wait(10)
    run.replicas[0] = run.start()
    run.step(**{"sync/restarted_replicas": 1, "rollout/replicas_alive": 1})
    time.sleep(1.0)
    assert not injector.happened[0].over, "the new engine has not joined yet"
    run.step(**{"rollout/replicas_alive": 2})
    wait_until(lambda: injector.happened[0].over, 30, "the end of the fault")
    assert injector.stop() == "" and injector.happened[0].recovered_s > 0


def test_the_run_is_asked_for_longer_steps_as_long_as_a_fault_lasts(run: Run) -> None:
    order, old = orders_of(run.directory) / SLOWER, run.replicas[0]
    injector = Injector(run.directory, [fault_of("kill-engine")], replicas=2, say=lambda text: None, slower=True)
    time.sleep(0.2)
    assert not order.exists(), "the fault is not due"
    run.step()
    wait_until(lambda: not run.alive(old.engine), 30, "the kill")
    assert order.exists()
    run.replicas[0] = run.start()
    run.step(**{"sync/restarted_replicas": 1, "rollout/replicas_alive": 2})
    wait_until(lambda: injector.happened[0].over, 30, "the end of the fault")
    wait_until(lambda: not order.exists(), 10, "the usual steps")
    assert injector.stop() == ""


@pytest.mark.slow
def test_a_fault_in_a_publication_waits_for_one(run: Run) -> None:
    run.step()
    schedule_file = run.directory / "schedule.jsonl"
    schedule_file.write_text('{"event": "set_version", "version": 1}\n')
    injector = Injector(run.directory, [fault_of("kill-engine-in-sync")], replicas=2, say=lambda text: None)
    old = run.replicas[0]
    time.sleep(0.3)
    assert run.alive(old.engine) and not injector.happened
    (run.directory / "logs").mkdir()
    told = f"the pool goes on without replica 3, {WENT_ON}\n"
    (run.directory / "logs" / "controller.log").write_text(told)  # of a loss before
    schedule_file.write_text('{"event": "announce", "version": 2}\n')
    wait_until(lambda: not run.alive(old.engine), 30, "the kill")
    run.replicas[0] = run.start()
    run.step(**{"sync/restarted_replicas": 1, "rollout/replicas_alive": 1})
    time.sleep(1.0)
    assert not injector.happened[0].over, "the new engine has not joined yet"
    (run.directory / "logs" / "controller.log").write_text(2 * told)
    run.step(**{"rollout/replicas_alive": 2})
    wait_until(lambda: injector.happened[0].over, 10, "the end of the fault")
    assert injector.stop() == ""
    event = injector.happened[0]
    assert "in a publication" in event.notes and event.beside and not event.busy


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 2])
def test_a_drained_replica_is_over_when_it_works_again(run: Run, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    commands: list[list[str]] = []

    def command(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(words[3:])
        return subprocess.CompletedProcess(words, code, "replica 1 is told\n", "megarl: it is not there\n")

    monkeypatch.setattr(subprocess, "run", command)
    run.step()
    injector = Injector(run.directory, [fault_of("drain-replica", 1)], replicas=2, say=lambda text: None)
    wait_until(lambda: bool(commands), 30, "the command")
    for _ in range(200):
        run.step()
        time.sleep(0.05)
        if injector.happened[0].over or code:
            break
    time.sleep(0.2)
    assert injector.stop() == "" and injector.happened[0].over == (code == 0)
    drain = ["pool", "drain", str(run.directory), "1"]
    assert commands == ([drain, [*drain, "--undo"]] if code == 0 else [drain])


def test_a_damaged_checkpoint_that_is_used_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is damaged when all processes have been killed, and not before there are two checkpoints."""
    for refused, steps in ((True, (5, 10)), (False, (15, 20))):
        for step in steps:
            path = run.directory / "checkpoints" / f"iter_{step:07d}"
            path.mkdir(parents=True)
            for name in ("__0_0.distcp", "manifest.json"):
                (path / name).write_text("x" * 100)

        def recover(refused: bool = refused, path: Path = path) -> None:
            run.agent, run.restarts = psutil.Process(os.getppid()), 0
            run.workers = [run.start().engine]
            wait_until(lambda: {each.read_text() for each in path.iterdir()} != {"x" * 100}, 10, "the damage")
            if refused:
                path.rename(path.with_name(f"{path.name}.damaged"))

        run.agent = psutil.Process()
        event = survive(run, "damage-job", recover, index=0)
        assert event.over == refused and ("was NOT refused" in str(event)) != refused


# A process that is started in the background ignores SIGINT, and so do its children until they say otherwise.
TREATS = (
    "import signal, time\nfor each in signal.SIGINT, signal.SIGTERM: signal.signal(each, {})\nprint(1, flush=True)\n"
    "time.sleep(600)\ntime.sleep(600)"
)
MEEK, STUBBORN = TREATS.format("signal.SIG_DFL"), TREATS.format("lambda *_: None")


@pytest.mark.parametrize(
    ("name", "stays"), [("interrupt-job", False), ("interrupt-job", True), ("terminate-job", False)]
)
def test_two_signals_must_end_all_processes(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, stays: bool) -> None:
    for each in run.workers:
        each.kill()
    code = STUBBORN if stays else MEEK
    command = [sys.executable, "-c", code]
    group = psutil.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE)
    run.started.append(group)
    run.workers, run.agent, ends = [group], group, run.start().engine
    assert group.stdout.readline() == b"1\n", "it treats signals as it shall"
    monkeypatch.setattr("soak_part_faults.ENDS_S", 0.5 if stays else 30.0)
    monkeypatch.setattr("soak_part_faults.AGAIN_S", 0.1)
    run.step()
    injector = Injector(run.directory, [fault_of(name)], replicas=2, say=lambda text: None)
    wait_until(lambda: len(injector.happened[-1:]) == 1, 30, "the fault")
    if not stays:
        wait_until(lambda: not run.alive(group), 30, "the end of the group")
        run.workers, run.agent = [ends], psutil.Process()
    deadline = time.monotonic() + 30
    while len(injector.happened[0].notes) <= (1 if stays else 2) and time.monotonic() < deadline:
        if not stays:
            run.step()  # until it has been noticed that the resumed run makes steps
        time.sleep(0.1)
    time.sleep(0.1)
    assert injector.stop() == "" and injector.happened[0].over != stays
    assert ("processes are left" in str(injector.happened[0])) == stays


def test_the_end_of_the_run_ends_the_faults_and_lets_stopped_processes_go_on(run: Run) -> None:
    run.step()
    faults = [fault_of("hang-replica", seconds=600.0), fault_of("kill-engine", 1)]
    injector = Injector(run.directory, faults, replicas=2, say=lambda text: None)
    wait_until(lambda: is_stopped([run.replicas[0].engine]), 30, "the hang")
    assert injector.stop() == ""
    wait_until(lambda: not is_stopped([run.replicas[0].engine]), 10, "the process to go on")
    assert [each.over for each in injector.happened] == [False]
    assert run.alive(run.replicas[1].engine)
    assert missing(faults, []) == ["hang-replica", "kill-engine"]


def test_what_goes_wrong_in_the_thread_of_the_faults_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run_dir: Path) -> dict[int, Replica]:
        raise psutil.AccessDenied(7)

    run.step()
    monkeypatch.setattr("soak_place.find_replicas", broken)
    injector = Injector(run.directory, [fault_of("kill-engine")], replicas=2, say=lambda text: None)
    wait_until(lambda: injector._error is not None, 30, "the error")
    told = injector.stop()
    assert told.startswith("the faults: Traceback") and "in broken" in told and "psutil.AccessDenied: (pid=7" in told


def test_a_fault_of_hosts_in_a_run_on_one_machine_is_an_error(run: Run) -> None:
    run.step()
    injector = Injector(run.directory, [fault_of("cut-link")], replicas=2, say=lambda text: None)
    wait_until(lambda: injector._error is not None, 30, "the error")
    assert "cut the link" in injector.stop() and not injector.happened


def test_a_thread_of_the_faults_that_does_not_end_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(soak_faults, "STOP_S", 0.1)
    injector = Injector(
        run.directory, [fault_of("kill-engine", after_step=0)], replicas=2, say=lambda text: bool(go.wait(60))
    )  # fmt: skip
    wait_until(lambda: bool(injector.happened), 30, "the fault")
    assert injector.stop() == "the faults: waited 0 s for their thread to end"
    go.set()


def test_missing_and_lethal() -> None:
    faults = [fault_of(name) for name in WANTED]
    happened = [Happened(fault, pid=1, step=1, at_s=0.0, over=fault.kind.action != "slow") for fault in faults]
    assert missing(faults, [each.fault for each in happened if each.over]) == ["slow-engine"]
    assert [each.fault.kind.name for each in lethal(happened)] == ["kill-engine", "hang-replica"]


def test_the_longest_time_without_a_step_begins_with_the_fault() -> None:
    records = [{"wall_time": at} for at in (0.0, 50.0, 51.0, 60.0, 62.0)]
    assert longest_gap(records, 2, 50.5) == 9.0
    assert longest_gap(records, 3, 58.0) == 2.0
    assert longest_gap(records, 0, -1.0) == 50.0
    assert longest_gap(records, 5, 63.0) == 0.0
