"""The order of gathers and broadcasts, on streams that behave as CUDA's do."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.errors import SyncAborted
from megarl.weights.group.stage import MemberProgress
from megarl.weights.plan.buckets import BUFFERS, Bucket, BucketPlan, TensorSpec, bucket_plan, schedule
from megarl.weights.send.sync_attempt import SyncAttempt
from tests.support.models.tiny import make_tiny_model
from tests.support.worlds.world import World

PUBLISH = "tests.support.ranks.sync.simulated_sync:publish"
EXPERTS_OVER_TENSOR_RANKS = {"tensor": 2, "expert": 2, "expert_tensor": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    return {family: str(make_tiny_model(directory / family, family=family)) for family in ("qwen3", "qwen3_moe")}


class CountedGather:
    """This rank's sends; they end when `released`."""

    owned = False

    def __init__(self) -> None:
        self.posts = 0
        self.released = False

    def copy(self) -> None:
        """Nothing to copy."""

    def post(self) -> None:
        self.posts += 1

    def done(self, timeout_s: float | None) -> bool:
        return self.released

    def finish(self) -> None:
        """Do nothing: a sender never calls it."""

    def unfinished_peers(self) -> tuple[int, ...]:
        return () if self.released else (0,)


@pytest.mark.parametrize("ended", range(5))
def test_after_a_failure_every_gather_is_posted_exactly_once(ended: int) -> None:
    """An engine fails while the first `ended` gathers have ended: those that are left are completed, none twice."""
    plan = bucket_plan([TensorSpec(f"t{number}", (16,), "float32", 0) for number in range(5)], 96)
    gathers = [CountedGather() for _ in plan.buckets]
    assert len(gathers) == 5
    for gather in gathers[:ended]:
        gather.released = True

    def check(waiting_for: str) -> None:
        assert "trainer rank 0 in the gather" in waiting_for
        raise SyncAborted("an engine failed")

    group: Any = SimpleNamespace(
        name="trainer rank 1", progress=MemberProgress("trainer rank 1"), check=check, fail=lambda error: None,
    )  # fmt: skip
    attempt = SyncAttempt(group, schedule(plan), gathers, None, rank=1, version=0)
    with pytest.raises(SyncAborted):
        attempt.run()
    assert sum(gather.posts for gather in gathers) == min(5, ended + 2), "at most two are on their way"
    for gather in gathers:
        gather.released = True
    attempt.finish_gathers(10.0)
    assert [gather.posts for gather in gathers] == [1] * 5


class Rank:
    """One of two ranks that both own buckets, with a group and buffers that note what it does, and nobody else.

    `fails_at`: the bucket whose broadcast fails.
    """

    def __init__(self, rank: int, plan: BucketPlan, fails_at: int | None) -> None:
        self.begun: list[tuple[str, int]] = []
        self.sealed: list[int] = []
        self.sealed_when_staged: list[int] | None = None
        self.occupied: dict[int, int] = {}  # own buckets that are gathered and still needed, by buffer
        self._fails_at = fails_at
        own = [bucket.index for bucket in plan.buckets if bucket.owner == rank]
        self._buffer_of = {index: number % BUFFERS for number, index in enumerate(own)}
        group: Any = SimpleNamespace(
            name=f"trainer rank {rank}", rank=rank, progress=MemberProgress(f"trainer rank {rank}"),
            store=SimpleNamespace(put=lambda key, value: None), key=lambda *parts: "", fail=lambda error: None,
            members=SimpleNamespace(senders=[0, 1]), broadcast=self._broadcast,
        )  # fmt: skip
        packer: Any = SimpleNamespace(seal=self._seal, wire=lambda bucket: None, scratch_B=torch.empty(0))
        gathers = [RankGather(self, bucket.index, bucket.owner == rank) for bucket in plan.buckets]
        self.attempt = SyncAttempt(group, schedule(plan), gathers, packer, rank, version=0)

    def post(self, index: int) -> None:
        self.begun.append(("gather", index))
        if index in self._buffer_of:
            assert self._buffer_of[index] not in self.occupied, f"bucket {index} is gathered into a buffer in flight"
            self.occupied[self._buffer_of[index]] = index

    def _seal(self, bucket: Bucket, version: int) -> int:
        self.sealed.append(bucket.index)
        return 0

    def _broadcast(self, wire_B: object, root: int, index: int) -> SimpleNamespace:
        if self.sealed_when_staged is None and self.attempt.staged.is_set():
            self.sealed_when_staged = list(self.sealed)
        if index == self._fails_at:
            raise SyncAborted("an engine failed")
        assert index in self.sealed or index not in self._buffer_of
        self.begun.append(("broadcast", index))
        return SimpleNamespace(wait=lambda: self.occupied.pop(self._buffer_of.get(index, -1), None))


class RankGather(CountedGather):
    """A gather whose messages end at once."""

    def __init__(self, rank: Rank, index: int, owned: bool) -> None:
        super().__init__()
        self._rank, self._index, self.owned = rank, index, owned
        self.released = True

    def post(self) -> None:
        self._rank.post(self._index)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.data())
def test_each_rank_follows_the_order_and_never_writes_into_a_buffer_in_flight(
    owners: list[int], data: st.DataObject
) -> None:
    """After a failure of engines at any broadcast, the gathers that are left are still made, in the same order."""
    plan = bucket_plan([TensorSpec(f"t{n}", (16,), "float32", owner) for n, owner in enumerate(owners)], 96, None)
    order = schedule(plan)
    fails_at = data.draw(st.none() | st.integers(0, len(plan.buckets) - 1))
    first = next(place for place, each in enumerate(order) if each.kind == "broadcast")
    for number in (0, 1):
        rank = Rank(number, plan, fails_at)
        if fails_at is None:
            rank.attempt.run()
            assert rank.begun == [(each.kind, each.bucket.index) for each in order] and not rank.occupied
        else:
            with pytest.raises(SyncAborted):
                rank.attempt.run()
            rank.occupied.clear()  # the content of the failed sync's buffers does not matter any more
            done = len(rank.begun)
            with patch.object(rank, "_buffer_of", {}):
                rank.attempt.finish_gathers(10.0)
            assert rank.begun[done:] == [e for e in rank.begun[done:] if e[0] == "gather"]
            gathered = [each for each in rank.begun if each[0] == "gather"]
            assert gathered == [(each.kind, each.bucket.index) for each in order if each.kind == "gather"]
        staged = [each.bucket.index for each in order[:first] if each.bucket.owner == number]
        assert rank.sealed_when_staged == staged, "the engines are paused when these are sealed, and not before"


LAYOUTS: dict[str, tuple[str, dict[str, Any], list[int]]] = {  # family, sizes, and ranks that send
    "TP2xEP2": ("qwen3_moe", EXPERTS_OVER_TENSOR_RANKS, [0, 1]),
    "EP2": ("qwen3_moe", {"expert": 2}, [0, 1]),
    "TP2": ("qwen3", {"tensor": 2}, [0]),
    "PP2": ("qwen3", {"pipeline": 2}, [0, 1]),
    "DP2": ("qwen3", {}, [0]),
}


def layout_cases() -> list[Any]:
    """Return all cases. The fast ones: the layout with most groups, on one queue, where operations can
    block most others, and on many, where a buffer can be written too early.
    """
    cases = []
    for name, layout in LAYOUTS.items():
        for single_queue in (False, True):
            label = f"{name}-{'one-queue' if single_queue else 'many-queues'}"
            marks = [] if name == "TP2xEP2" else [pytest.mark.slow]
            cases.append(pytest.param(*layout, single_queue, id=label, marks=marks))
    return cases


@pytest.mark.world
@pytest.mark.parametrize(("family", "sizes", "senders", "single_queue"), layout_cases())
def test_every_layout_arrives_bit_for_bit(
    world: Callable[[int], World],
    models: dict[str, str],
    family: str,
    sizes: dict[str, Any],
    senders: list[int],
    single_queue: bool,
) -> None:
    results = world(2).run(PUBLISH, model=models[family], sizes=sizes, single_queue=single_queue)
    for result in results:
        assert result["error"] is None
        assert result["senders"] == senders
        assert max(result["buckets"]) > 4, "an owner's buffers are used again"
        # At the first message of a pair NCCL blocks the host; the pairs of gathers have exchanged theirs by then.
        assert result["connected"] == (1 if "tensor" in sizes else 0)


@pytest.mark.world
def test_several_owners_and_tensor_groups_arrive_bit_for_bit(
    world: Callable[[int], World], models: dict[str, str]
) -> None:
    """Two pipeline stages of two tensor ranks each, whose experts are spread over the tensor ranks."""
    sizes = {**EXPERTS_OVER_TENSOR_RANKS, "pipeline": 2}
    results = world(4).run(PUBLISH, model=models["qwen3_moe"], sizes=sizes, single_queue=True)
    assert [result["error"] for result in results] == [None] * 4
    assert results[0]["senders"] == [0, 1, 2, 3]
