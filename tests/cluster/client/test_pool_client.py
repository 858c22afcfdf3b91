"""The trainer's calls to replicas whose actors are gone, without Ray's cluster."""

import asyncio
import ctypes
import math
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray

from megarl.cluster.client import connection
from megarl.cluster.client import pool_client as client_module
from megarl.cluster.client.connection import ConnectionCut, connect_ray
from megarl.cluster.client.pool_client import PoolClient, PoolHandles, PoolReplica
from megarl.cluster.pool.pool_process import SupervisorHandle, write_state
from megarl.common.errors import PoolEnded, ReplicaFailed, RolloutError
from megarl.common.process.processes import ProcessId
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.rollout.admission.counters import Counters
from megarl.rollout.orchestrator.failover import CommitAnswer
from megarl.rollout.orchestrator.step_batches import BatchReady
from megarl.rollout.transport.rpc import AnsweredCalls


def test_a_replica_whose_actor_has_ended_fails_its_calls_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray forgets the name of an actor that has ended; a sync then replaces the replica that failed."""

    def get_actor(name: str, namespace: str) -> object:
        assert namespace == "megarl-abc"
        if name.endswith("1"):
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return object()

    monkeypatch.setattr(ray, "get_actor", get_actor)
    client: Any = SimpleNamespace(
        handle=SimpleNamespace(namespace="megarl-abc", run_dir=str(tmp_path), check=lambda: None),
        members=lambda: [0, 1],
        timeouts=BOUNDS,
    )
    replicas = PoolHandles(client).replicas()
    assert [each.name for each in replicas] == ["replica 0", "replica 1"]
    with pytest.raises(
        ReplicaFailed, match=r"^replica 1 had already ended when it was asked to world_size; see .*replica-1"
    ):
        replicas[1].call("world_size", timeout_s=5)


@pytest.mark.parametrize("address", ["10.0.0.7", None])
def test_a_rank_connects_to_ray_at_the_address_of_its_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None
) -> None:
    """Without an agent, which sets it, Ray takes any raylet of this host."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", options.update)
    handle: Any = SimpleNamespace(run_dir=str(tmp_path), address="10.0.0.1:6379", namespace="megarl-abc")
    with mock.patch.dict(os.environ, {} if address is None else {NODE_ADDRESS_VARIABLE: address}):
        if address is None:
            os.environ.pop(NODE_ADDRESS_VARIABLE, None)
        connect_ray(handle, 5.0)
    assert (options["address"], options["namespace"]) == ("10.0.0.1:6379", "megarl-abc")
    assert options["_node_ip_address"] == address


BOUNDS: Any = SimpleNamespace(rpc_s=60.0)


class Silent:
    """An actor whose methods never answer; Ray learns of no death when its own head has died too."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: name)


@pytest.mark.parametrize("whose", ["replica's", "controller's"])
def test_a_call_to_a_pool_whose_supervisor_is_killed_ends_long_before_its_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whose: str
) -> None:
    def get(reference: object, timeout: float) -> None:
        time.sleep(min(timeout, 0.05))
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    supervisor = subprocess.Popen(["sleep", "600"])
    process = ProcessId.of(supervisor.pid)
    write_state(tmp_path, {"state": "ready"})
    handle = SupervisorHandle(str(tmp_path), "", "", "", 0, "", process, platform.node())
    actor: Any = Silent()
    calls: dict[str, Any] = {
        "replica's": PoolReplica(0, actor, tmp_path / "log", handle.check, 60.0).call,
        "controller's": PoolClient(handle, BOUNDS, 1, actor).call,
    }
    with pytest.raises((TimeoutError, RolloutError), match=r"within [0-9] s|waited [0-9] s"):
        calls[whose]("pause", timeout_s=0.2)
    supervisor.kill()
    supervisor.wait()
    with pytest.raises(PoolEnded, match=r"the rollout pool has ended: its supervisor was killed; see .*logs"):
        calls[whose]("pause", timeout_s=600)


@dataclass
class CutOff:
    """An actor behind a network that loses some answers, or each of them; every call that arrives runs.

    It stands for `ray.get` too, to which it gives the keys and methods of the calls.
    """

    lost: int
    calls: AnsweredCalls = field(default_factory=AnsweredCalls)
    commits: int = 0
    sent: int = 0

    @property
    def answer(self) -> Any:
        return SimpleNamespace(remote=lambda *call: call)

    @property
    def __ray_ready__(self) -> Any:
        return SimpleNamespace(remote=lambda: (f"probe {self.sent}", "ready", (), {}))

    async def ready(self) -> None: ...

    async def commit(self, step: int) -> int:
        self.commits += 1
        return step

    def get(self, call: Any, timeout: float) -> Any:
        key, method, args, kwargs = call
        self.sent += 1
        answer = asyncio.run(self.calls.answer(key, lambda: getattr(self, method)(*args, **kwargs)))
        if self.sent <= self.lost:
            raise ray.exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError", b"0" * 16)
        return answer


def ok() -> None: ...


def cut_off(monkeypatch: pytest.MonkeyPatch, lost: int) -> tuple[CutOff, PoolClient]:
    actor = CutOff(lost)
    monkeypatch.setattr(ray, "get", actor.get)
    monkeypatch.setattr(connection, "RETRY_S", 0.01)
    handle: Any = SimpleNamespace(check=ok, check_parts=ok, host="pool-0", run_dir="run", rebuilds=0)
    return actor, PoolClient(handle, BOUNDS, 1, actor)  # type: ignore[arg-type]


def test_a_commit_whose_answer_is_lost_is_sent_again_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, client = cut_off(monkeypatch, lost=3)
    assert client.call("commit", 7, timeout_s=30) == 7
    assert (actor.sent, actor.commits) == (5, 1), "the commit, three probes, the commit"


def test_a_network_that_stays_cut_is_an_error_that_names_it_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, client = cut_off(monkeypatch, lost=10**9)
    message = r"^trainer rank 0 could not reach the rollout controller for [0-9]+ s, .*commit"
    for timeout_s, reach_s in ((0.3, 60.0), (1e6, 0.6)):  # a call may take long, but not to reach the controller
        monkeypatch.setattr(BOUNDS, "rpc_s", reach_s)
        with pytest.raises(ConnectionCut, match=message):
            client.call("commit", 7, timeout_s=timeout_s)
    assert actor.sent > 4
    replica: Any = PoolReplica(5, actor, Path("log"), lambda: None, 60.0)  # type: ignore[arg-type]
    with pytest.raises(
        ReplicaFailed, match=r"^replica 5 could not be reached for [0-9]+ s, in which .* commit; see log"
    ):
        replica.call("commit", 7, timeout_s=0.1)


@dataclass
class SlowlyCut:
    """An actor behind a network, in a time of its own. Ray reports a lost message `report_s` after it was sent.

    `cuts`: from when to when the network is cut; a message is lost if it is then, or its answer would be, under way.
    """

    cuts: list[tuple[float, float]]
    report_s: float
    runs_s: float  # how long a call runs
    now: float = 0.0
    calls: int = 0

    @property
    def answer(self) -> Any:
        return SimpleNamespace(remote=lambda *call: self._send(self.runs_s))

    @property
    def __ray_ready__(self) -> Any:
        return SimpleNamespace(remote=lambda: self._send(0.0))

    def _send(self, runs_s: float) -> tuple[float, bool]:
        """Holds when the answer, or the report of the loss, comes, and which of the two."""
        self.calls += runs_s > 0
        arrives = self.now + runs_s
        lost = [begin for begin, end in self.cuts if begin <= arrives and self.now < end]
        return (max(self.now, lost[0]) + self.report_s, False) if lost else (arrives, True)

    def get(self, reference: tuple[float, bool], timeout: float) -> str:
        at, answered = reference
        if at > self.now + timeout:
            self.sleep(timeout)
            raise ray.exceptions.GetTimeoutError
        self.now = max(self.now, at)
        if not answered:
            raise ray.exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError", b"0" * 16)
        return "answered"

    def wait(self, references: list[tuple[float, bool]], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        ended = [each for each in references if each[0] <= self.now]
        return ended, [each for each in references if each[0] > self.now]

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)


@dataclass
class LostAnswer(SlowlyCut):
    """The first call's answer falls into the cut, and Ray reports that only when something is sent after the cut."""

    reported: float = math.inf

    def _send(self, runs_s: float) -> tuple[float, bool]:
        ((begin, end),) = self.cuts
        if self.now < begin and runs_s > 0:
            self.calls += 1
            return (math.inf, False)
        if self.now >= end:
            self.reported = min(self.reported, self.now)
        return super()._send(runs_s)

    def get(self, reference: tuple[float, bool], timeout: float) -> str:
        if reference[0] == math.inf and self.reported < math.inf:
            raise ray.exceptions.ActorUnavailableError("The actor is temporarily unavailable: RpcError", b"0" * 16)
        return super().get(reference, timeout)


def slowly_cut(monkeypatch: pytest.MonkeyPatch, *cuts: tuple[float, float]) -> tuple[SlowlyCut, PoolReplica]:
    """Reports come after 70 s, longer than half of `timeouts.rpc_s`; a call runs for 200 s."""
    actor = SlowlyCut(list(cuts), report_s=70.0, runs_s=200.0)
    return actor, in_its_time(monkeypatch, actor)


def in_its_time(monkeypatch: pytest.MonkeyPatch, actor: SlowlyCut) -> PoolReplica:
    monkeypatch.setattr(ray, "get", actor.get)
    monkeypatch.setattr(ray, "wait", actor.wait)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: actor.now, sleep=actor.sleep))
    return PoolReplica(5, actor, Path("log"), ok, 60.0)  # type: ignore[arg-type]


def test_a_call_whose_answer_falls_into_a_cut_tests_its_connection_and_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = LostAnswer([(50.0, 80.0)], report_s=70.0, runs_s=60.0)
    replica = in_its_time(monkeypatch, actor)
    assert replica.call("generate", timeout_s=1800.0) == "answered"
    assert actor.calls == 2
    lost = 80 + actor.report_s  # of a probe that was sent in the cut; the next one follows it
    assert actor.now <= lost + connection.PROBE_S + connection.SLICE_S + connection.RETRY_S + actor.runs_s


def test_each_of_several_cuts_of_one_call_has_the_whole_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them the call was under way for longer than the bound, which nothing but a probe shows."""
    actor, replica = slowly_cut(monkeypatch, (50.0, 120.0), (250.0, 310.0), (500.0, 550.0))
    assert replica.call("generate", timeout_s=1800.0) == "answered"
    assert actor.calls == 4 and actor.now > 700


def test_a_rank_that_has_left_ray_survives_sigterm_until_it_has_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's shutdown resets the signal below Python; torchrun sends it when another rank has ended."""

    def shutdown() -> None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(int(signal.SIGTERM), None)

    def handled() -> bool:
        mask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
        return bool(int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(client_module, "stop_supervisor", lambda *_: None)
    pool: Any = SimpleNamespace(
        handle=SimpleNamespace(run_dir=str(tmp_path), process=None, launch_id="", host=None),
        timeouts=SimpleNamespace(shutdown_s=1.0),
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert handled()
        PoolClient.close(pool)
        assert handled()
        shutdown()
        assert not handled()
    finally:
        signal.signal(signal.SIGTERM, before)


# --- controllers that die


@dataclass
class Mortal:
    """A controller that keeps what it is asked; `dies` tells at which calls, and whether these have run."""

    name: str
    dies: dict[str, bool] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)
    during: Callable[[str], None] = lambda method: None
    dead: bool = False

    @property
    def answer(self) -> Any:
        return SimpleNamespace(remote=lambda key, method, args, kwargs: (self, method, args, kwargs))

    def run(self, method: str, args: Any, kwargs: Any) -> Any:
        self.during(method)
        if self.dead or method in self.dies:
            if not self.dead and self.dies[method]:
                self.asked.append((method, args))
            self.dead = True
            raise ray.exceptions.ActorDiedError
        self.asked.append((method, args))
        steps = args[0] + 1 if method == "commit_and_report" else 0
        answers = {
            "commit_and_report": CommitAnswer(Counters(trained=steps), {"admission": {"steps": steps}}),
            "wait_batch": BatchReady(args[0] if args else 0, ["0:0"], Counters(), {}, [0]),
            "references": {4: "a"},
        }
        return answers.get(method, Counters())


class Mortals:
    """Controllers one after the other, and a client of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *controllers: Mortal) -> None:
        self.controllers, self.started = list(controllers), 1
        monkeypatch.setattr(ray, "get", lambda call, timeout: call[0].run(*call[1:]))
        monkeypatch.setattr(ray, "get_actor", lambda name, namespace: self.controllers[self.started - 1])
        monkeypatch.setattr(client_module, "await_rebuilt", self.rebuilt)
        self.client = PoolClient(self.handle(0), LIMITS, 1, controllers[0])  # type: ignore[arg-type]

    def handle(self, rebuilds: int) -> Any:
        names = {"host": "pool-0", "run_dir": "run", "namespace": "n", "rebuilds": rebuilds}
        return SimpleNamespace(check=ok, check_parts=ok, **names)

    def rebuilt(self, handle: Any, timeout_s: float) -> Any:
        assert handle.rebuilds == self.started - 1, "each death is followed by one new controller"
        self.started += 1
        return self.handle(handle.rebuilds + 1)

    def trains(self) -> PoolClient:
        """Begin, publish version 0, and take the batch of step 0."""
        self.client.begin(None)
        self.client.announce(0)
        self.client.set_version(0)
        ready = self.client.wait_batch(0)
        assert isinstance(ready, BatchReady) and self.client.keep(0, ready.rebuilds)
        return self.client


LIMITS: Any = SimpleNamespace(rpc_s=60.0, engine_start_s=60.0, weight_sync_s=60.0, generate_s=60.0)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_commit_at_which_the_controller_dies_is_made_by_the_new_one(
    monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    """Nobody knows whether the old one has made it; the new one begins before it."""
    old, new = Mortal("old", {"commit_and_report": has_run}), Mortal("new")
    client = Mortals(monkeypatch, old, new).trains()
    assert client.commit(0, trained=1, filtered=0, dropped_stale=0, failed=0).trained == 1
    [(first, (handover,)), (second, args)] = new.asked
    assert (first, second, args) == ("take_over", "commit_and_report", (0,))
    assert handover.history is None and [batch.step for batch in handover.held] == [0] and handover.base == (0, 0)
    assert client._record.now is not None and not client._record.now.held
    assert client.handle.rebuilds == 1


def test_a_controller_that_dies_while_it_takes_over_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    old, next_one, last = Mortal("old", {"references": False}), Mortal("next", {"take_over": False}), Mortal("last")
    client = Mortals(monkeypatch, old, next_one, last).trains()
    assert client.references([4]) == {4: "a"} and client.handle.rebuilds == 2
    assert [method for method, _ in last.asked] == ["take_over", "references"]


def test_a_batch_of_a_dead_controller_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks read it, while rank 0 has already reported to the new controller that it has no such batch."""
    old, new = Mortal("old", {"references": False}), Mortal("new")
    client = Mortals(monkeypatch, old, new).trains()
    ready = client.wait_batch(1)
    assert isinstance(ready, BatchReady) and ready.rebuilds == 0
    client.references([4])
    assert not client.keep(1, ready.rebuilds)
    [(_, (handover,)), *_] = new.asked
    assert [batch.step for batch in handover.held] == [0]
    again = client.wait_batch(1)
    assert isinstance(again, BatchReady) and again.rebuilds == 1 and client.keep(1, 1)


def test_several_threads_tell_the_new_controller_once(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = Mortal("old", {"references": False, "admit": False}), Mortal("new")
    both = threading.Barrier(2)
    old.during = lambda method: both.wait(60) and None if method in old.dies else None
    client = Mortals(monkeypatch, old, new).trains()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda call: call(), [lambda: client.references([4]), lambda: client.admit(1)]))
    assert sorted(method for method, _ in new.asked) == ["admit", "references", "take_over"]


def test_engines_are_left_alone_in_the_middle_of_a_weight_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread finds the controller dead; the one that publishes ends its sync first, and tells the new one."""
    old, new = Mortal("old", {"references": False}), Mortal("new")
    client = Mortals(monkeypatch, old, new).trains()
    client.announce(1)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(client.references, [4])
        time.sleep(0.2)
        assert not new.asked and not asking.done()
        client.set_version(1)
        assert asking.result(60) == {4: "a"} and client.handle.rebuilds == 1
    [(first, (handover,)), *others] = new.asked
    # Which of the two threads is answered first is not promised.
    assert first == "take_over" and sorted(method for method, _ in others) == ["references", "set_version"]
    assert (handover.version, handover.announced) == (0, 1)


def test_a_controller_that_hangs_is_lost_as_soon_as_the_supervisor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's bound may pass just before the supervisor's."""
    old, new = Mortal("old"), Mortal("new")
    pool = Mortals(monkeypatch, old, new)
    client = pool.trains()
    waited: list[float] = []
    client.handle.has_lost_parts = lambda timeout_s: waited.append(timeout_s) or True  # type: ignore[method-assign]

    def hang(method: str) -> None:
        raise ray.exceptions.GetTimeoutError

    old.during = hang
    monkeypatch.setattr(client.timeouts, "rpc_s", 0.0)
    assert client.references([4]) == {4: "a"} and client.handle.rebuilds == 1
    assert waited == [client_module.NOTICED_S]


def test_without_a_trainer_a_dead_controller_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Mortals(monkeypatch, Mortal("old", {"evaluate": False}), Mortal("new"))
    with pytest.raises(RolloutError, match=r"the rollout controller died; see .*controller.log"):
        pool.client.evaluate(0)
    assert pool.started == 1
