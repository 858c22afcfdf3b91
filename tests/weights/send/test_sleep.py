"""The leader's calls that put engines to sleep and wake them, with replicas that fail in each way."""

from collections.abc import Callable
from typing import Any

import pytest

from megarl.common.errors import EngineMayRun, PoolEnded, ReplicaFailed, WeightSyncError
from megarl.common.values import GIB
from megarl.weights.send.sleep import HeldMemory, put_to_sleep, wake_caches


class Replica:
    """Raises what `fails` has for a method, and notes the calls."""

    def __init__(self, index: int, **fails: BaseException) -> None:
        self.name, self._fails, self.calls = f"replica {index}", fails, list[Any]()
        self.bounds_s: list[float] = []

    def call(self, method: str, *args: object, timeout_s: float) -> int:
        self.calls.append((method, *args))
        self.bounds_s.append(timeout_s)
        if (error := self._fails.get(method)) is not None:
            raise error
        return {"sleep": 2, "wake": 70}.get(method, 0) * GIB


DEAD = ReplicaFailed(1, "replica 1 is dead: its engine's process ended in generation")
CUT_OFF = EngineMayRun(1, "replica 1 could not be reached for 60 s")
SILENT = TimeoutError("replica 1 did not answer within 1 s")
Replicas = Callable[..., list[Replica]]


def test_all_engines_sleep_and_wake() -> None:
    replicas = [Replica(0), Replica(1)]
    assert put_to_sleep(replicas, 5.0) == [] and wake_caches(replicas, 5.0) == []
    assert [each.calls for each in replicas] == [[("sleep",), ("wake", "kv_cache")]] * 2
    assert put_to_sleep(replicas, 5.0, start_s=600.0) == [] and replicas[0].bounds_s == [5.0, 5.0, 605.0]


@pytest.mark.parametrize("also", [{}, {"shutdown": DEAD}], ids=["it lives", "its actor has died"])
def test_a_failed_engine_is_ended_so_that_it_holds_no_memory(also: dict[str, BaseException]) -> None:
    replicas = [Replica(0), Replica(1, sleep=DEAD, **also)]
    assert put_to_sleep(replicas, 5.0) == ["replica 1"]
    assert [each.calls for each in replicas] == [[("sleep",)], [("sleep",), ("shutdown",)]]


@pytest.mark.parametrize(
    ("fails", "what"),
    [
        ({"sleep": SILENT}, "to sleep"),
        ({"sleep": DEAD, "shutdown": SILENT}, "to end its engine"),
        ({"sleep": CUT_OFF}, "to sleep"),
        ({"sleep": DEAD, "shutdown": CUT_OFF}, "to end its engine"),
    ],
)
def test_an_engine_that_may_hold_memory_still_ends_the_hand_over_with_its_name(
    fails: dict[str, BaseException], what: str
) -> None:
    with pytest.raises(WeightSyncError, match=f"for replica 1 {what}, and may not use the GPUs") as info:
        put_to_sleep([Replica(0), Replica(1, **fails)], 1.0)
    assert info.value.failed_members == ("engine replica 1",)


@pytest.mark.parametrize("fails", [{}, {"sleep": DEAD}], ids=["while it sleeps", "while it ends"])
def test_the_end_of_the_pool_is_no_engine_that_is_waited_for(fails: dict[str, BaseException]) -> None:
    ended = PoolEnded("the rollout pool has ended: its supervisor was killed")
    with pytest.raises(PoolEnded, match="its supervisor was killed"):
        put_to_sleep([Replica(0), Replica(1, **{"sleep": ended, "shutdown": ended, **fails})], 1.0)
    with pytest.raises(PoolEnded, match="its supervisor was killed"):
        wake_caches([Replica(0), Replica(1, wake=ended)], 1.0)


def test_a_late_hand_over_says_what_each_engine_held_last() -> None:
    held, replicas = HeldMemory(), [Replica(0), Replica(1), Replica(2)]
    assert put_to_sleep(replicas, 5.0, held) == [] and held.most_asleep == 2 * GIB
    assert wake_caches(replicas, 5.0, held) == [] and held.most_asleep == 0
    replicas[1]._fails, replicas[2]._fails = {"sleep": SILENT}, {"sleep": DEAD}
    with pytest.raises(WeightSyncError) as info:
        put_to_sleep(replicas, 1.0, held)
    known = "replica 0 2.00 GiB asleep, replica 1 70.00 GiB awake, replica 2 70.00 GiB awake"
    assert str(info.value).endswith(f"; what engines held last: {known}")
    replicas[1]._fails = {}
    assert put_to_sleep(replicas, 1.0, held) == ["replica 2"]
    assert str(held) == "replica 0 2.00 GiB asleep, replica 1 2.00 GiB asleep", "one that has ended holds nothing"


@pytest.mark.parametrize("error", [DEAD, SILENT])
def test_an_engine_that_does_not_wake_refuses_requests_and_the_others_go_on(error: BaseException) -> None:
    replicas = [Replica(0), Replica(1, wake=error)]
    assert wake_caches(replicas, 1.0) == ["replica 1"]
    assert replicas[0].calls == [("wake", "kv_cache")]
    method, reason = replicas[1].calls[-1]
    assert method == "fail" and "could not wake from its sleep" in reason
