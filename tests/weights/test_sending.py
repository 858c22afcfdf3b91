"""The order of gathers and broadcasts, on streams that behave as CUDA's do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.errors import SyncAborted
from megarl.weights.buckets import TensorSpec, bucket_plan
from megarl.weights.member_progress import MemberProgress
from megarl.weights.sending import Sending
from tests.support.tiny import make_tiny_model
from tests.support.world import World

PUBLISH = "tests.support.ranks.simulated_sync:publish"
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
        """Not called on a sender."""

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

    store = SimpleNamespace(put=lambda key, value: None)
    group: Any = SimpleNamespace(
        name="trainer rank 1", rank=None, progress=MemberProgress("trainer rank 1"), check=check, store=store,
        key=lambda *parts: "", post_abort=lambda reason: None, abort=lambda: None,
    )  # fmt: skip
    sending = Sending(group, plan, gathers, None, rank=1, version=0)
    with pytest.raises(SyncAborted):
        sending.run()
    assert sum(gather.posts for gather in gathers) == min(5, ended + 2), "at most two are on their way"
    for gather in gathers:
        gather.released = True
    sending.finish_gathers(10.0)
    assert [gather.posts for gather in gathers] == [1] * 5


@pytest.mark.world
@pytest.mark.parametrize("single_queue", [False, True])
def test_two_threads_without_a_common_order_wait_for_each_other(
    world: Callable[[int], World], models: dict[str, str], single_queue: bool
) -> None:
    """The simulation sees the deadlock that gloo cannot show: the deadline of 8 s ends the sync, or a host is stuck.

    A host that reads a digest behind the circle waits for its stream; on CUDA nothing would end that.
    """
    results = world(2).run(
        PUBLISH,
        model=models["qwen3_moe"],
        sizes=EXPERTS_OVER_TENSOR_RANKS,
        single_queue=single_queue,
        old_way=True,
        sync_s=8.0,
    )
    assert results[0]["senders"] == [0, 1]
    assert all("waited" in result["error"] and result["seconds"] > 7.0 for result in results)
    if not single_queue:
        assert "weight sync of version 0 failed" in results[0]["error"]


@pytest.mark.world
@pytest.mark.parametrize("single_queue", [False, True], ids=["many-queues", "one-queue"])
@pytest.mark.parametrize(
    ("family", "sizes", "senders"),
    [
        ("qwen3_moe", EXPERTS_OVER_TENSOR_RANKS, [0, 1]),
        ("qwen3_moe", {"expert": 2}, [0, 1]),
        ("qwen3", {"tensor": 2}, [0]),
        ("qwen3", {"pipeline": 2}, [0, 1]),
        ("qwen3", {}, [0]),
    ],
    ids=["TP2xEP2", "EP2", "TP2", "PP2", "DP2"],
)
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
