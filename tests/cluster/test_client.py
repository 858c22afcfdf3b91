"""The trainer's calls to replicas whose actors are gone, without Ray's cluster."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl.cluster import client as client_module
from megarl.cluster.client import PoolClient, PoolHandles
from megarl.common.errors import ReplicaFailed


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
        handle=SimpleNamespace(namespace="megarl-abc", run_dir=str(tmp_path)), members=lambda: [0, 1]
    )
    replicas = PoolHandles(client).replicas()
    assert [each.name for each in replicas] == ["replica 0", "replica 1"]
    with pytest.raises(ReplicaFailed, match=r"^replica 1 had ended when it was asked to world_size; see .*replica-1"):
        replicas[1].call("world_size", timeout_s=5)


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
