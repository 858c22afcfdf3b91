"""State that is parked between updates changes nothing, bit for bit, and what is lost in parking is seen."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megarl import platforms
from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.common.errors import WeightSyncError
from megarl.common.values import GIB
from megarl.trainer.parking import NOTHING, StateMemory, _Parked
from tests.support.trainer.rank_fixtures import OnRanks

pytestmark = pytest.mark.world

BF16 = {"trainer__precision": "bf16"}
PLAIN = {"trainer__optimizer__distributed": False}
CASES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "dense", {}, {}),
    (2, "dense", {}, BF16),
    (2, "dense", {}, BF16 | PLAIN),
    (2, "tied", {"pipeline": 2, "virtual_pipeline": 2}, {}),
    (2, "moe", {"expert": 2}, BF16),
]


@pytest.fixture
def updated(on_ranks: OnRanks) -> OnRanks:
    def run(ranks: int, model: str, layout: dict[str, Any], **options: Any) -> list[Any]:
        return on_ranks(ranks, "training.parking:updates", model, layout=layout, **options)

    return run


def same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    return all(
        a["metrics"] == b["metrics"]
        and all(torch.equal(value, b["weights"][name]) for name, value in a["weights"].items())
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(("ranks", "model", "layout", "changes"), CASES)
def test_parked_state_is_that_of_a_trainer_that_keeps_it(
    updated: OnRanks, ranks: int, model: str, layout: dict[str, Any], changes: dict[str, Any]
) -> None:
    kept = updated(ranks, model, layout, park=False, **changes)
    parked = updated(ranks, model, layout, park=True, **changes)
    assert same(kept, parked)
    for plain, moved in zip(kept, parked, strict=True):
        assert all(map(torch.equal, plain["reference"], moved["reference"]))
        for turn in moved["bytes"]:
            assert turn["again"] == turn["live"] > turn["out"] == turn["back"] == turn["host"]
            assert turn["zero"] and "parked in host memory" in turn["refused"]
        assert len({turn["host"] for turn in moved["bytes"]}) == 1  # blocks are made once


@pytest.mark.parametrize("part", ["weights", "optimizer", "frozen"])
def test_a_block_that_is_lost_is_seen(updated: OnRanks, part: str) -> None:
    kept = updated(1, "dense", {}, park=False)
    lost = updated(1, "dense", {}, park=True, lose=part)
    changed = not same(kept, lost)
    assert changed if part != "frozen" else not all(map(torch.equal, kept[0]["reference"], lost[0]["reference"]))


def test_gradients_come_back_as_zeros_whatever_their_memory_held(on_ranks: OnRanks) -> None:
    (zero,) = on_ranks(1, "training.parking:dirty_gradients", layout={})
    assert zero and all(zero)


def test_what_transformer_engine_returns_in_place_of_fused_gradients_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {(6144, 4096, torch.bfloat16): torch.zeros(1)}
    engine = SimpleNamespace(_dummy_wgrads=kept)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", cast(Any, engine))
    StateMemory([], cast(Any, SimpleNamespace(zero_grad=lambda: None, optimizer=None))).hold(NOTHING)
    assert not kept


def test_a_rank_waits_for_the_memory_of_an_engine_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = StateMemory([], cast(Any, None))
    memory._parked = [
        _Parked("weights", cast(Any, None), 6 * GIB, None),
        _Parked("optimizer", cast(Any, None), GIB, None),
    ]
    monkeypatch.setattr(platforms, "current", lambda: SimpleNamespace(is_cuda=True))
    free = [2 * GIB, 6 * GIB, 7 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0) if len(free) > 1 else free[0], 80 * GIB))
    memory.await_room(60.0, ["replica 1"])
    assert free == [7 * GIB]
    free[:] = [2 * GIB]
    waited = r"waited 0 s .* for replica 1 to release a GPU: 2\.00 GiB of it are free, and its state takes 7\.00 GiB"
    with pytest.raises(WeightSyncError, match=waited):
        memory.await_room(0.0, ["replica 1"])


def test_a_save_of_a_parked_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its storages are empty: what a checkpoint copied from them would be lost."""
    memory = StateMemory([], cast(Any, None))
    memory.resident = NOTHING
    checkpointer: Any = object.__new__(Checkpointer)
    checkpointer.policy, checkpointer.newest = SimpleNamespace(memory=memory), None
    monkeypatch.setattr(Checkpointer, "poll", lambda *_, **__: True)
    with pytest.raises(RuntimeError, match=r"gradients.*weights are parked in host memory"):
        checkpointer.copy(3)
