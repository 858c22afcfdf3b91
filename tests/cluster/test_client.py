"""The trainer's calls to replicas whose actors are gone, without Ray's cluster."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl.cluster import client as client_module
from megarl.cluster.client import ConnectionCut, PoolClient, PoolHandles, ReplicaClient
from megarl.cluster.handle import SupervisorHandle, write_state
from megarl.common.errors import PoolEnded, ReplicaFailed, RolloutError
from megarl.common.processes import ProcessId
from megarl.rollout.answered_calls import AnsweredCalls


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
        config=BOUNDS,
    )
    replicas = PoolHandles(client).replicas()
    assert [each.name for each in replicas] == ["replica 0", "replica 1"]
    with pytest.raises(ReplicaFailed, match=r"^replica 1 had ended when it was asked to world_size; see .*replica-1"):
        replicas[1].call("world_size", timeout_s=5)


BOUNDS: Any = SimpleNamespace(timeouts=SimpleNamespace(rpc_s=60.0))


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
    supervisor = subprocess.Popen(["sleep", "60"])
    process = ProcessId.of(supervisor.pid)
    write_state(tmp_path, {"state": "ready"})
    handle = SupervisorHandle(str(tmp_path), "", "", "", 0, "", process, platform.node())
    actor: Any = Silent()
    calls: dict[str, Any] = {
        "replica's": ReplicaClient(0, actor, tmp_path / "log", handle.check, 60.0).call,
        "controller's": PoolClient(handle, BOUNDS, actor).call,
    }
    with pytest.raises((TimeoutError, RolloutError), match=r"within 0 s|waited 0 s"):
        calls[whose]("pause", timeout_s=0.2)
    supervisor.kill()
    supervisor.wait()
    with pytest.raises(PoolEnded, match=r"the rollout pool has ended: its supervisor was killed; see .*logs"):
        calls[whose]("pause", timeout_s=60)


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
    monkeypatch.setattr(client_module, "RETRY_S", 0.01)
    handle: Any = SimpleNamespace(check=ok, check_parts=ok, host="pool-0", run_dir="run", rebuilds=0)
    return actor, PoolClient(handle, BOUNDS, actor)  # type: ignore[arg-type]


def test_a_commit_whose_answer_is_lost_is_sent_again_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, client = cut_off(monkeypatch, lost=3)
    assert client.call("commit", 7, timeout_s=30) == 7
    assert (actor.sent, actor.commits) == (4, 1)


def test_a_network_that_stays_cut_is_an_error_that_names_it_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, client = cut_off(monkeypatch, lost=10**9)
    message = r"^trainer rank 0 could not reach the rollout controller for [01] s, .*commit"
    for timeout_s, reach_s in ((0.3, 60.0), (1000.0, 0.6)):
        monkeypatch.setattr(BOUNDS.timeouts, "rpc_s", reach_s)
        begun = time.monotonic()
        with pytest.raises(ConnectionCut, match=message):
            client.call("commit", 7, timeout_s=timeout_s)
        assert time.monotonic() - begun < 5, "a call may take long, but not to reach the controller"
    assert actor.sent > 4
    replica: Any = ReplicaClient(5, actor, Path("log"), lambda: None, 60.0)  # type: ignore[arg-type]
    with pytest.raises(ReplicaFailed, match=r"^replica 5 could not be reached for 0 s, in which .* commit; see log"):
        replica.call("commit", 7, timeout_s=0.1)


def test_a_cut_that_is_the_end_of_the_pool_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, client = cut_off(monkeypatch, lost=10**9)

    def ended() -> None:
        if actor.sent > 2:
            raise PoolEnded("the rollout pool has ended: SIGTERM")

    handle: Any = SimpleNamespace(check=ended, check_parts=ended, host="", run_dir="")
    client._connection = replace(client._connection, handle=handle)
    with pytest.raises(PoolEnded, match="SIGTERM"):
        client.call("commit", 7, timeout_s=60)


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
        config=SimpleNamespace(timeouts=SimpleNamespace(shutdown_s=1.0)),
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
