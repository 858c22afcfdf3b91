"""The leader's calls to the replicas, without a group."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.errors import WeightSyncError
from megarl.weights.group.stage import Answer, answer_key
from megarl.weights.group.transport import GroupMembers
from megarl.weights.plan.buckets import TensorSpec, bucket_plan
from megarl.weights.send import leader
from megarl.weights.send.failure import unusable
from megarl.weights.send.leader import EngineCalls


class Replica:
    """Calls `act` with the method's name, and records the calls that returned."""

    def __init__(self, name: str, act: Callable[[str], object]) -> None:
        self.name, self._act, self.ended = name, act, list[str]()

    def call(self, method: str, *args: object, timeout_s: float) -> None:
        self._act(method)
        self.ended.append(method)


@pytest.fixture
def engine_calls() -> Callable[[list[Replica]], EngineCalls]:
    def make(
        replicas: list[Replica], store: Any = None, trainer_ranks: int = 1, rpc_s: float = 5.0, phase: str = "pause"
    ) -> EngineCalls:
        handles: Any = None
        calls = EngineCalls(handles, store, trainer_ranks, rpc_s=rpc_s, recompute_kv=True)
        calls._replicas, calls._phase = list(replicas), phase
        return calls

    return make


def test_after_a_failure_all_replicas_are_called_at_the_same_time(engine_calls: Callable[..., EngineCalls]) -> None:
    """One after the other, many replicas that hang would outlast the time that trainer ranks wait for the outcome."""
    together = threading.Barrier(3, timeout=10)
    replicas = [Replica(f"replica {index}", lambda _: together.wait()) for index in range(3)]
    failure = WeightSyncError("failed", needs_restart=["replica 0", "replica 2"])
    assert engine_calls(replicas).after_failure(failure, repeats=True) == ["replica 0", "replica 2"]
    assert [each.ended for each in replicas] == [["fail"], ["resume"], ["fail"]]


def test_a_dead_replica_does_not_keep_the_others_from_being_resumed(engine_calls: Callable[..., EngineCalls]) -> None:
    def die(_: str) -> None:
        raise ConnectionError("the actor died")

    replicas = [Replica("replica 0", die), Replica("replica 1", lambda _: None)]
    engine_calls(replicas).after_failure(WeightSyncError("failed", needs_restart=["replica 0"]), repeats=True)
    assert [each.ended for each in replicas] == [[], ["resume"]]


@pytest.mark.parametrize(
    ("repeats", "ended", "replaced"),
    [
        (True, [["fail"], ["abandon_weight_update"], ["fail"]], ["replica 0", "replica 2"]),
        (False, [["fail"], ["fail"], ["fail"]], ["replica 0", "replica 1", "replica 2"]),
    ],
)
def test_an_interrupted_replica_is_kept_only_if_the_sync_repeats_and_it_can_give_up_what_it_has_loaded(
    engine_calls: Callable[..., EngineCalls], repeats: bool, ended: list[list[str]], replaced: list[str]
) -> None:
    """Replica 2 cannot. No replica may resume."""

    def refuse(method: str) -> None:
        if method == "abandon_weight_update":
            raise RuntimeError("an interrupted reload left 3 tensors that the engine cannot use")

    acts = [lambda _: None, lambda _: None, refuse]
    replicas = [Replica(f"replica {index}", act) for index, act in enumerate(acts)]
    failure = WeightSyncError("failed", needs_restart=["replica 0"])
    assert engine_calls(replicas, phase="update").after_failure(failure, repeats=repeats) == replaced
    assert [each.ended for each in replicas] == ended


@pytest.mark.parametrize(
    ("phase", "failed", "replaced"),
    [
        ("stage", ["trainer rank 0"], []),
        ("pause", ["engine replica 1"], ["replica 1"]),
        ("pause", ["trainer rank 0"], []),
        ("update", ["engine replica 1 worker 0"], ["replica 1"]),
        ("finish", ["engine replica 0", "engine replica 2"], ["replica 0", "replica 2"]),
        ("update", [], ["replica 0", "replica 1", "replica 2"]),
        ("update", ["engine replica 1", "trainer rank 1"], ["replica 0", "replica 1", "replica 2"]),
    ],
)
def test_only_if_engines_alone_have_failed_the_others_are_not_in_doubt(
    phase: str, failed: list[str], replaced: list[str]
) -> None:
    members = GroupMembers(0, (0, 1), ("replica 0", "replica 1", "replica 2"), (1, 1, 1), "gloo", timeout_s=60.0)
    assert list(unusable(members, failed, phase)) == replaced


class Sync:
    """A sync of trainer ranks 0 and 1 with two replicas, in which the members answer as they are asked."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.members = GroupMembers(0, (0, 1), ("replica 0", "replica 1"), (1, 1), "gloo", timeout_s=60.0)
        kept = {answer_key("g0/s0", answer.member): asdict(answer) for answer in answers}
        self.store = SimpleNamespace(get=kept.get, block_all=lambda keys, timeout_s: None)
        self.failed = threading.Event()  # set when a member has failed
        self.group: Any = SimpleNamespace(
            name="trainer rank 0", names=self.members.names, members=self.members, stage="g0/s0",
            abort_reason="the deadline passed", aborted=self.failed.is_set, post_abort=lambda reason: None,
            key=lambda *parts: "/".join(map(str, parts)),
        )  # fmt: skip
        self.plan = bucket_plan([TensorSpec(f"t{number}", (16,), "float32", number) for number in (0, 1)], 96)

    def error(self, calls: EngineCalls, *, staged: bool) -> WeightSyncError:
        """Publish, which must fail, and do what the sender does then."""
        event = threading.Event()
        if staged:
            event.set()
        with pytest.raises(WeightSyncError) as info:
            calls.publish(self.group, self.plan, 0, 1, 5.0, event)
        calls.after_failure(info.value, repeats=False)
        return info.value


BEHIND_RANK_2 = [
    Answer("trainer rank 0", "the gather of bucket 1 of 2", ("trainer rank 2",), seconds=5.0, expired=True),
    Answer("trainer rank 1", "the broadcast of bucket 1", bucket=0, entered=1, seconds=4.0),
    Answer("trainer rank 2", "packing its part of bucket 1 of 2", seconds=5.0),
]


def test_engines_that_were_not_called_are_no_cause_of_a_failure(engine_calls: Callable[..., EngineCalls]) -> None:
    """Rank 1 is in the first broadcast already, in which all engines are missing; rank 0 still stages, behind rank 2.

    The engines are silent because they generate. Rank 2 is the cause, and no engine must be restarted, or is called.
    """
    replicas = [Replica("replica 0", lambda _: None), Replica("replica 1", lambda _: None)]
    sync = Sync(BEHIND_RANK_2)
    sync.failed.set()
    error = sync.error(engine_calls(replicas, sync.store, trainer_ranks=3), staged=False)
    assert "rank 0 waited 5.0 s for trainer rank 2 in the gather" in str(error)
    assert error.failed_members == ("trainer rank 2",) and error.needs_restart == ()
    assert [each.ended for each in replicas] == [[], []]


def test_a_pause_that_the_failure_of_another_member_cuts_short_is_no_cause(
    engine_calls: Callable[..., EngineCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 1 needs longer for its pause than is left after the failure; it is healthy, and goes on."""
    monkeypatch.setattr(leader, "EXTRA_WAIT_S", 0.2)
    sync, go = Sync(BEHIND_RANK_2), threading.Event()

    def slow(method: str) -> None:
        if method == "pause":
            sync.failed.set()
            go.wait(60)

    replicas = [Replica("replica 0", lambda _: None), Replica("replica 1", slow)]
    error = sync.error(engine_calls(replicas, sync.store, trainer_ranks=3), staged=True)
    go.set()
    assert error.failed_members == ("trainer rank 2",) and error.needs_restart == (), str(error)
    assert "failed during pause" in str(error)
    assert replicas[0].ended == ["pause", "resume"] and "resume" in replicas[1].ended


def test_a_replica_that_does_not_pause_in_time_is_the_cause(
    engine_calls: Callable[..., EngineCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause it waits for no other member, unlike in its update: its silence is its own failure."""
    monkeypatch.setattr(leader, "EXTRA_WAIT_S", 0.2)
    sync, go = Sync(BEHIND_RANK_2), threading.Event()
    silent = Replica("replica 1", lambda method: go.wait(60) if method == "pause" else None)
    calls = engine_calls([Replica("replica 0", lambda _: None), silent], sync.store, trainer_ranks=3, rpc_s=0.3)
    error = sync.error(calls, staged=True)
    go.set()
    assert error.failed_members == ("engine replica 1",) and error.needs_restart == ("replica 1",), str(error)
    assert "no answer to pause within 0.3 s" in str(error)
