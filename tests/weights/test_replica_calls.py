"""The leader's calls to the replicas, without a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from megarl.common.errors import WeightSyncError
from megarl.weights.replica_calls import EngineCalls


class Replica:
    """Calls `act` with the method's name, and records the calls that returned."""

    def __init__(self, name: str, act: Callable[[str], object]) -> None:
        self.name, self._act, self.ended = name, act, list[str]()

    def call(self, method: str, *args: object, timeout_s: float) -> None:
        self._act(method)
        self.ended.append(method)


@pytest.fixture
def engine_calls() -> Callable[[list[Replica]], EngineCalls]:
    def make(replicas: list[Replica]) -> EngineCalls:
        handles: Any = None
        calls = EngineCalls(handles, handles, trainer_ranks=1, rpc_s=5.0, recompute_kv=True)
        calls._replicas = list(replicas)
        return calls

    return make


def test_after_a_failure_all_replicas_are_called_at_the_same_time(engine_calls: Callable[..., EngineCalls]) -> None:
    """One after the other, many replicas that hang would outlast the time that trainer ranks wait for the outcome."""
    together = threading.Barrier(3, timeout=10)
    replicas = [Replica(f"replica {index}", lambda _: together.wait()) for index in range(3)]
    failure = WeightSyncError("failed", needs_restart=["replica 0", "replica 2"])
    engine_calls(replicas).after_failure(failure)
    assert [each.ended for each in replicas] == [["fail"], ["resume"], ["fail"]]


def test_a_dead_replica_does_not_keep_the_others_from_being_resumed(engine_calls: Callable[..., EngineCalls]) -> None:
    def die(_: str) -> None:
        raise ConnectionError("the actor died")

    replicas = [Replica("replica 0", die), Replica("replica 1", lambda _: None)]
    engine_calls(replicas).after_failure(WeightSyncError("failed", needs_restart=["replica 0"]))
    assert [each.ended for each in replicas] == [[], ["resume"]]
