"""Faults that are no signal alone: orders, disks, handles, the time limit, agent workers, changes of the pool."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import soak_pool, soak_processes
from benchmarks.soak_faults import Injector
from benchmarks.soak_happened import Happened
from benchmarks.soak_kinds import FLOODED, KINDS
from benchmarks.soak_orders import take
from benchmarks.soak_pool import PoolChange
from benchmarks.soak_processes import find_processes
from benchmarks.soak_variant import orders_of
from tests.support.faulted_run import Run, fault_of
from tests.support.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    directory = tmp_path / "run"
    directory.mkdir()
    living = Run(directory, monkeypatch)
    monkeypatch.setattr("soak_watch.WatchedRun.NOTICE_S", 2.0)
    yield living
    living.close()


def tell(run: Run, text: str) -> None:
    with run.directory.with_suffix(".log").open("a") as log:
        log.write(f"{text}\n")


def let_happen(run: Run, name: str, between: Callable[[], object] = lambda: None, seconds: float = 0.0) -> Happened:
    """Let a fault happen, do something `between`, and take steps until its judgement is there."""
    run.step()
    ends = threading.Event()

    def say(text: str) -> None:
        if text.startswith("step") and any(part in text for part in ("two more", "NOT", "could not")):
            ends.set()

    injector = Injector(run.directory, [fault_of(name, seconds=seconds)], replicas=2, say=say)
    wait_until(lambda: bool(injector.happened), 30, "the fault")
    between()
    deadline = time.monotonic() + 30
    while not ends.is_set() and time.monotonic() < deadline:
        run.step()
        time.sleep(0.05)
    assert injector.stop() == ""
    return injector.happened[0]


def obey(run: Run, order: str) -> None:
    wait_until(lambda: take(orders_of(run.directory), order), 10, f"the order {order}")


def test_an_order_that_was_taken_is_over_when_the_run_has_noticed_it(run: Run) -> None:
    def between() -> None:
        obey(run, "gradient")
        tell(run, "step 1: the gradient norm is nan; the step is skipped (1 of at most 2)")

    event = let_happen(run, "spoil-gradient", between)
    assert event.over and event.pid == psutil.Process().pid and "the order gradient was taken" in str(event)


@pytest.mark.slow
def test_an_order_of_which_the_run_says_nothing_is_not_over(run: Run) -> None:
    tell(run, "the step is skipped (before the fault)")
    event = let_happen(run, "spoil-logprob", lambda: obey(run, "logprob"))
    assert not event.over and "the run has NOT told: the step is skipped" in str(event)


def test_an_order_that_nobody_takes_has_not_happened_and_is_withdrawn(run: Run) -> None:
    event = let_happen(run, "fork-reward")
    assert not event.over and "it could not be done" in event.notes
    assert not list(orders_of(run.directory).iterdir())


@pytest.mark.parametrize("counted", [True, False])
def test_a_flood_must_be_counted_by_its_metric(run: Run, counted: bool) -> None:
    def between() -> None:
        obey(run, "flood-reward")
        run.step(**{"reward/redone": float(counted)})

    event = let_happen(run, "flood-reward", between)
    assert event.over == counted and ("reward/redone has NOT counted it" in str(event)) != counted


@pytest.mark.parametrize("tells", [True, False])
def test_what_an_agent_loop_was_told_to_do_must_be_in_its_worker_s_log(run: Run, tells: bool) -> None:
    name, told = "flood-agent-worker", FLOODED
    log = run.directory / "logs" / "worker-1.log"
    log.parent.mkdir()
    log.write_text(f"{told} before the fault\n")

    def between() -> None:
        obey(run, name)
        with log.open("a") as lines:
            lines.write(f"{told}\n" if tells else "nothing\n")

    event = let_happen(run, name, between)
    assert event.over == tells and ("the run has NOT told" in str(event)) != tells


def test_a_lost_agent_worker_is_over_when_all_of_them_are_there_again(run: Run) -> None:
    """One of two is killed. One that is left alone is not enough."""
    old = run.workers[0]

    def between() -> None:
        wait_until(lambda: not run.alive(old), 10, "the kill")
        for _ in range(3):
            run.step(**{"rollout/workers_lost": 1.0})
            time.sleep(0.1)
        run.workers.append(run.start().engine)

    event = let_happen(run, "kill-agent-worker", between)
    assert event.over and "one of 2" in event.notes
    assert event.recovered_s > 0.3, "it was over while one worker was missing"


@pytest.mark.parametrize("redone", [0, 1])
def test_a_time_limit_costs_one_start_and_no_step(run: Run, redone: int) -> None:
    def between() -> None:
        wait_until((run.directory / "stop").exists, 10, "the request")
        for each in run.workers:
            each.kill()
        time.sleep(0.2)  # the injector sees them all ended
        tell(run, "stopping after 1 of 9 steps: the time limit is near")
        if redone:
            metrics = run.directory / "metrics.jsonl"
            metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
            time.sleep(0.2)
        run.agent = run.start().engine
        run.workers = [run.agent]
        time.sleep(0.2)

    event = let_happen(run, "limit-job", between)
    assert event.over == (not redone), str(event)
    assert ("1 steps were made again, 0 are allowed" in str(event)) == bool(redone)


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_the_disk_of_the_checkpoints_is_full_until_a_save_has_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """Afterwards another checkpoint must be saved."""
    filled: list[Path] = []
    checkpoints = run.directory.with_suffix(".checkpoints")

    def save(step: int) -> None:
        (checkpoints / f"iter_{step}").mkdir(parents=True)
        (checkpoints / f"iter_{step}" / "manifest.json").touch()

    def fill(directory: Path, seconds: float, until: Callable[[], bool]) -> float:
        filled.append(directory)
        assert not until()
        tell(run, "the checkpoint of step 5 could NOT be saved: no space")
        assert until() and seconds == 90.0
        return 1.0

    save(1)
    monkeypatch.setattr("soak_part_faults.fill", fill)
    monkeypatch.setattr("soak_watch.WatchedRun.RECOVER_S", 3.0)
    run.step()
    injector = Injector(
        run.directory, [fault_of("fill-checkpoint-disk", seconds=90.0)], replicas=2, say=lambda text: None
    )  # fmt: skip
    deadline = time.monotonic() + 6
    saved = False
    while time.monotonic() < deadline and not (injector.happened and injector.happened[0].over and saved):
        run.step()
        time.sleep(0.1)
        if saves and not saved and run.steps > 10:
            save(run.steps)
            saved = True
    time.sleep(0.3)
    assert injector.stop() == "" and filled == [checkpoints]
    assert injector.happened[0].over == saves, str(injector.happened[0])
    assert ("no checkpoint was saved" in str(injector.happened[0])) != saves


@pytest.mark.parametrize("asked", [Counter({"stop": 3, "claim.json": 1}), Counter[str]()])
def test_stale_handles_have_happened_only_if_a_process_has_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: Counter[str]
) -> None:
    monkeypatch.setattr("soak_part_faults.spoil", lambda orders, seconds, until: asked)
    event = let_happen(run, "stale-files", seconds=12.0)
    assert event.over == bool(asked)
    assert ("claim.json 1, stop 3" if asked else "nobody has asked") in str(event)


# --- the processes of agent workers


def test_only_the_reward_workers_of_agent_workers_are_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the controller have no work while agent workers run the loops."""
    scorer = "(exec -a 'python -m megarl.rewards.worker' sleep 600)"
    script = f"""
        (exec -a ray::AgentWorker.take bash -c "{scorer} & wait") &
        (exec -a ray::RolloutController bash -c "{scorer} & wait") &
        wait
    """
    monkeypatch.setattr(soak_processes, "STARTED_S", 0.0)
    monkeypatch.setattr(soak_processes, "WORKER_STARTED_S", 4.0)
    supervisor = psutil.Popen(["bash", "-c", script])
    try:
        (tmp_path / "supervisor.json").write_text(json.dumps({"process": {"pid": supervisor.pid}}))
        wait_until(lambda: len(supervisor.children(recursive=True)) >= 4, 30, "the processes")
        assert not find_processes(tmp_path, "agent-worker"), "it is being started"
        wait_until(lambda: len(find_processes(tmp_path, "agent-worker")) == 1, 30, "the agent worker")
        [worker] = find_processes(tmp_path, "agent-worker")
        wait_until(lambda: len(find_processes(tmp_path, "reward")) == 1, 30, "its reward worker")
        [found] = find_processes(tmp_path, "reward")
        assert found.ppid() == worker.pid
    finally:
        for each in [*supervisor.children(recursive=True), supervisor]:
            each.kill()
        supervisor.wait(10)


# --- `megarl pool`


class Pool:
    """Answers the commands as `megarl pool` does; an engine that was added serves at the second look."""

    def __init__(self, fails: str = "") -> None:
        self.states = {0: "serving", 2: "serving"}  # 1 was lost before
        self.asked: list[str] = []
        self.fails = fails

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        action, arguments = command[4], command[6:]
        if action == "list":
            told = {"replicas": [{"replica": number, "state": state} for number, state in self.states.items()]}
            self.states = dict.fromkeys(self.states, "serving") if self.fails != "serve" else self.states
            return subprocess.CompletedProcess(command, 0, json.dumps(told), "")
        self.asked.append(" ".join([action, *arguments]))
        if action == self.fails:
            return subprocess.CompletedProcess(command, 2, "", "megarl: it is refused\n")
        if action == "add":
            self.states[3] = "joining"
        if action == "remove":
            del self.states[int(arguments[0])]
        return subprocess.CompletedProcess(command, 0, f"{action} is done\n", "")


def change(monkeypatch: pytest.MonkeyPatch, pool: Pool, notes: list[str], goes_on: bool = True) -> PoolChange:
    monkeypatch.setattr(soak_pool.subprocess, "run", pool)

    def wait(condition: Callable[[], bool], timeout_s: float) -> bool:
        return any(condition() for _ in range(3))

    return PoolChange(Path("run"), notes.append, lambda: goes_on, wait)


def test_the_pool_is_changed_and_is_in_the_end_as_large_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, asked in (
        ("drain", ["drain 2", "drain 2 --undo"]),
        ("add_for_a_while", ["add", "remove 3"]),
        ("exchange", ["remove 2", "add"]),
    ):
        pool, notes = Pool(), list[str]()
        made = getattr(change(monkeypatch, pool, notes), name)
        assert made(*([] if name == "add_for_a_while" else [2])), name
        assert pool.asked == asked and len(pool.states) == 2 and notes[0].endswith("is done")


@pytest.mark.parametrize("fails", ["add", "remove", "serve"])
def test_a_pool_that_refuses_or_an_engine_that_never_serves_is_told(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    notes: list[str] = []
    assert not change(monkeypatch, Pool(fails), notes).add_for_a_while()
    assert not change(monkeypatch, Pool(fails), notes).exchange(2)
    assert not change(monkeypatch, Pool(), notes, goes_on=False).exchange(2)
    assert ("megarl: it is refused" in notes) == (fails != "serve")


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [0.0, 1.0])
def test_an_exchanged_replica_is_over_when_its_engine_has_ended_without_a_restart(
    run: Run, monkeypatch: pytest.MonkeyPatch, restarted: float
) -> None:
    old = run.replicas[1].engine
    asked: list[int] = []

    def exchange(self: PoolChange, number: int) -> bool:
        asked.append(number)
        run.replicas[1] = run.start()
        old.kill()
        return self.goes_on()

    monkeypatch.setattr("soak_replica_faults.PoolChange.exchange", exchange)
    monkeypatch.setattr("soak_watch.WatchedRun.NOTICE_S", 20.0)
    run.step()
    injector = Injector(run.directory, [fault_of("remove-replica", 1)], replicas=2, say=lambda text: None)
    wait_until(lambda: bool(injector.happened), 30, "the fault")
    deadline = time.monotonic() + 20
    while "another engine" not in str(injector.happened[0]) and time.monotonic() < deadline:
        run.step(**{"sync/restarted_replicas": restarted})
        time.sleep(0.1)
    assert injector.stop() == ""
    assert injector.happened[0].over == (not restarted) and asked == [1], str(injector.happened[0])


def test_every_kind_has_one_way_to_happen() -> None:
    for kind in KINDS.values():
        assert kind.has_processes or kind.order or kind.ending or kind.needs_hosts or kind.action in ("fill", "stale")
    assert {kind.order for kind in KINDS.values()} == {
        "", "fork-reward", "flood-reward", "flood-agent-worker", "gradient", "logprob",
    }  # fmt: skip
    assert KINDS["limit-job"].redone == 0 and KINDS["kill-job"].redone > 0
