"""Faults of hosts and links: what is done to the hosts, and what the run must do about it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import soak_hosts
from benchmarks.soak_faults import Injector
from benchmarks.soak_happened import Happened
from benchmarks.soak_host_faults import GROWN, SHRUNK
from benchmarks.soak_hosts import Hosts, why_no_hosts
from benchmarks.soak_kinds import KINDS
from benchmarks.soak_place import ENGINES, HOSTS_RPC_S, TRAINER, SeveralHosts
from tests.support.faulted_run import Run, fault_of
from tests.support.waiting import wait_until


class NotedHosts(Hosts):
    """Hosts that are only noted, whose processes are those of a run."""

    def __init__(self, directory: Path, run: Run) -> None:
        super().__init__(SeveralHosts.COUNT, directory)
        self.run, self.done = run, list[str]()
        self.deaf = False  # to `cut`

    def processes(self, index: int) -> list[psutil.Process]:
        return self.run.find_processes(self.run.directory, "job") if index == TRAINER else []

    def lose(self, index: int) -> None:
        self.done.append(f"lose {index}")

    def revive(self, index: int) -> None:
        self.done.append(f"revive {index}")

    def cut(self, index: int) -> None:
        self.done.append(f"cut {index}")

    def mend(self, index: int) -> None:
        self.done.append(f"mend {index}")

    def reaches(self, index: int, other: int) -> bool:
        return not self.done or self.done[-1] != f"cut {TRAINER}" or self.deaf


class NotedPlace(SeveralHosts):
    """Finds what a run has; a host that is back is only noted."""

    def __init__(self, hosts: NotedHosts) -> None:
        super().__init__(hosts)
        self.noted = hosts

    def find_replicas(self, run_dir: Path) -> dict[int, Any]:
        return self.noted.run.find(run_dir)

    def find_agent(self, run_dir: Path) -> psutil.Process:
        return self.noted.run.agent

    def start_agent(self, run_dir: Path, index: int) -> None:
        self.noted.done.append(f"start {index}")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    directory = tmp_path / "run"
    directory.mkdir()
    living = Run(directory, monkeypatch)
    monkeypatch.setattr("soak_watch.WatchedRun.RECOVER_S", 3.0)
    yield living
    living.close()


def tell(run: Run, text: str) -> None:
    with run.directory.with_suffix(".log").open("a") as log:
        log.write(f"{text}\n")


def let_happen(
    run: Run, directory: Path, name: str, between: Callable[[NotedHosts, Injector], object], alive: list[int]
) -> tuple[Happened, list[str]]:
    """Let a fault happen, do something `between`, take steps with `alive[0]` engines; return what was made of it."""
    hosts, said = NotedHosts(directory, run), list[str]()
    run.step(**{"rollout/replicas_alive": 2.0})
    place = NotedPlace(hosts)
    fault = fault_of(name, seconds=0.3)
    injector = Injector(run.directory, [fault], replicas=2, say=said.append, place=place)
    wait_until(lambda: bool(injector.happened), 30, "the fault")
    thread = threading.Thread(target=between, args=(hosts, injector), daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while len(said) < 2 and time.monotonic() < deadline:
        run.step(**{"rollout/replicas_alive": float(alive[0])})
        time.sleep(0.05)
    thread.join(10)
    assert injector.stop() == ""
    return injector.happened[0], hosts.done


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_link_that_is_cut_for_a_time_costs_no_restart(run: Run, tmp_path: Path, restarts: int) -> None:
    def between(hosts: NotedHosts, injector: Injector) -> None:
        wait_until(lambda: hosts.done == [f"cut {TRAINER}", f"mend {TRAINER}"], 10, "the cut")
        run.restarts += restarts

    run.restarts = 0
    if restarts:
        run.restarts = 2
    event, done = let_happen(run, tmp_path, "cut-link", between, [2])
    assert done == [f"cut {TRAINER}", f"mend {TRAINER}"]
    assert event.over == (not restarts), str(event)


@pytest.mark.parametrize("fails", ["", "shrinks", "grows"])
def test_a_host_that_is_lost_and_back_makes_the_pool_smaller_and_as_large_as_before(
    run: Run, tmp_path: Path, fails: str
) -> None:
    alive = [2]

    def between(hosts: NotedHosts, injector: Injector) -> None:
        wait_until(lambda: hosts.done == [f"lose {ENGINES}"], 10, "the loss")
        if fails == "shrinks":
            return
        alive[0] = 1
        tell(run, f"the pool goes on with 1 engines; 1 that were lost are {SHRUNK}")
        wait_until(lambda: hosts.done[1:] == [f"revive {ENGINES}", f"start {ENGINES}"], 10, "the host")
        if fails != "grows":
            tell(run, f"1 {GROWN}; they join with the next publication")
            alive[0] = 2

    event, done = let_happen(run, tmp_path, "lose-node", between, alive)
    assert event.over == (not fails), str(event)
    assert done[:2] == [f"lose {ENGINES}", f"revive {ENGINES}"], "a lost host would stay lost"


def test_a_link_that_stays_cut_is_mended_before_the_job_is_started_again(run: Run, tmp_path: Path) -> None:
    checkpoint = run.directory / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    told = "trainer rank 0 could not reach the rollout controller for 60 s"

    def between(hosts: NotedHosts, injector: Injector) -> None:
        wait_until(lambda: hosts.done == [f"cut {TRAINER}"], 10, "the cut")
        tell(run, f"megarl: {told}\n(rank 0 on host1; traceback in the log)")
        (run.directory / "exit.json").write_text(json.dumps({"status": "failed", "step": 1, "reason": told}))
        for each in run.workers:
            each.kill()
        injector.ends.ended(1)
        assert hosts.done == [f"cut {TRAINER}", f"mend {TRAINER}"]
        tell(run, "resuming from iter_0000001, 1 steps done")
        run.workers = [run.start().engine]
        run.agent = run.workers[0]

    event, _ = let_happen(run, tmp_path, "sever-link", between, [2])
    assert event.over, str(event)


def test_a_job_that_does_not_end_in_time_has_not_survived_a_link_that_stays_cut(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["sever-link"]
    assert kind.ending is not None and kind.ending.within_s == 300.0 + HOSTS_RPC_S + 60.0
    monkeypatch.setitem(KINDS, "sever-link", replace(kind, ending=replace(kind.ending, within_s=0.5)))
    checkpoint = run.directory / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()

    def between(hosts: NotedHosts, injector: Injector) -> None:
        wait_until(lambda: hosts.done == [f"cut {TRAINER}", f"mend {TRAINER}"], 10, "the bound")

    event, _ = let_happen(run, tmp_path, "sever-link", between, [2])
    assert not event.over and event.notes[-1] == "the job did NOT end within 0 s", str(event)


def test_processes_are_found_on_the_hosts_by_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pids that a run writes down are those of its hosts."""
    script = """
        (exec -a unshare sh -c 'sleep 600; true' 'exec python -m megarl.cluster.nodes.agent launch.json 0') &
        sleep 0.2
        {python} -c 'import time; time.sleep(600)' -m megarl.cluster.nodes.agent launch.json 0 &
        (exec -a 'python -m megarl.cluster.nodes.torchrun train_rl.py' sleep 600) &
        (exec -a 'python train_rl.py' sleep 600) &
        (exec -a ray::RolloutController sleep 600) &
        wait
    """.replace("{python}", sys.executable)
    host = psutil.Popen(["bash", "-c", script])
    hosts = Hosts(SeveralHosts.COUNT, tmp_path)
    monkeypatch.setattr(hosts, "processes", lambda index: host.children(recursive=True) if index == TRAINER else [])
    place = SeveralHosts(hosts)
    try:
        wait_until(lambda: len(place.find_processes(tmp_path, "controller")) == 1, 30, "the controller")
        wait_until(lambda: len(place.find_processes(tmp_path, "rank")) == 1, 30, "the rank")
        wait_until(lambda: place.find_agent(tmp_path) is not None, 30, "the agent of the node")
        agent = place.find_agent(tmp_path)
        assert agent is not None and "launch.json" in agent.cmdline(), "not what connects to the host"
        (rank,) = place.find_processes(tmp_path, "rank")
        assert "torchrun" not in " ".join(rank.cmdline())
        assert len(place.find_processes(tmp_path, "job")) >= 5 and place.find_replicas(tmp_path) == {}
    finally:
        for each in [*host.children(recursive=True), host]:
            each.kill()
        host.wait(10)
    assert sys.executable in place.variables().values()


def test_a_link_that_is_not_really_cut_is_no_fault(run: Run, tmp_path: Path) -> None:
    hosts = NotedHosts(tmp_path, run)
    hosts.deaf = True
    with pytest.raises(RuntimeError, match="NOT cut"), SeveralHosts(hosts).cut_link():
        pytest.fail("the fault lasts")
    assert hosts.done[-1] == f"mend {TRAINER}"


def test_hosts_that_cannot_be_had_are_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean-up of a host that was not made fails too."""

    def refused(arguments: str) -> None:
        raise RuntimeError(f"ip {arguments}: Operation not permitted")

    monkeypatch.setattr(soak_hosts, "_ip", refused)
    monkeypatch.setattr(soak_hosts, "NEEDED", ())
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "Operation not permitted" in why_no_hosts()


def test_a_kind_that_needs_hosts_hits_no_process_of_this_machine() -> None:
    needing = {name for name, kind in KINDS.items() if kind.needs_hosts}
    assert needing == {"cut-link", "sever-link", "lose-node"}
    assert not any(KINDS[name].has_processes for name in needing) and all(KINDS[n].may_cost_replicas for n in needing)
    assert not KINDS["kill-job"].happens_on_hosts and KINDS["kill-engine"].happens_on_hosts
