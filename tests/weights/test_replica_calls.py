"""The leader's calls to the replicas, without a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.errors import WeightSyncError
from megarl.weights.buckets import TensorSpec, bucket_plan
from megarl.weights.member_progress import Answer
from megarl.weights.replica_calls import EngineCalls
from megarl.weights.transport import GroupMembers
from megarl.weights.watch import answer_key


class Replica:
    """Calls `act` with the method's name, and records the calls that returned."""

    def __init__(self, name: str, act: Callable[[str], object]) -> None:
        self.name, self._act, self.ended = name, act, list[str]()

    def call(self, method: str, *args: object, timeout_s: float) -> None:
        self._act(method)
        self.ended.append(method)


@pytest.fixture
def engine_calls() -> Callable[[list[Replica]], EngineCalls]:
    def make(replicas: list[Replica], store: Any = None, trainer_ranks: int = 1) -> EngineCalls:
        handles: Any = None
        calls = EngineCalls(handles, store, trainer_ranks, rpc_s=5.0, recompute_kv=True)
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


def test_engines_that_were_not_called_are_no_cause_of_a_failure(engine_calls: Callable[..., EngineCalls]) -> None:
    """Rank 1 is in the first broadcast already, in which all engines are missing; rank 0 still stages, behind rank 2.

    The engines are silent because they generate. Rank 2 is the cause, and no engine must be restarted, or is called.
    """
    replicas = [Replica("replica 0", lambda _: None), Replica("replica 1", lambda _: None)]
    members = GroupMembers(0, (0, 1), ("replica 0", "replica 1"), (1, 1), "gloo", timeout_s=60.0)
    answers = [
        Answer("trainer rank 0", "the gather of bucket 1 of 2", ("trainer rank 2",), seconds=5.0, expired=True),
        Answer("trainer rank 1", "the broadcast of bucket 1", bucket=0, entered=1, seconds=4.0),
        Answer("trainer rank 2", "packing its part of bucket 1 of 2", seconds=5.0),
    ]
    kept = {answer_key("g0/s0", answer.member): answer.to_json() for answer in answers}
    store = SimpleNamespace(get=kept.get, block_all=lambda keys, timeout_s: None)
    group: Any = SimpleNamespace(
        name="trainer rank 0", names=members.names, members=members, stage="g0/s0", abort_reason="the deadline passed",
        aborted=lambda: True, post_abort=lambda reason: None, key=lambda *parts: "/".join(map(str, parts)),
    )  # fmt: skip
    calls = engine_calls(replicas, store, trainer_ranks=3)
    plan = bucket_plan([TensorSpec(f"t{number}", (16,), "float32", number) for number in (0, 1)], 96)
    with pytest.raises(WeightSyncError, match=r"rank 0 waited 5\.0 s for trainer rank 2 in the gather") as info:
        calls.publish(group, plan, 0, 1, 5.0, threading.Event())
    assert info.value.failed_members == ("trainer rank 2",) and info.value.needs_restart == ()
    calls.after_failure(info.value)
    assert [each.ended for each in replicas] == [[], []]
