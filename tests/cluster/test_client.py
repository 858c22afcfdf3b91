"""The trainer's calls to replicas whose actors are gone, without Ray's cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from megarl.cluster.client import PoolHandles
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
