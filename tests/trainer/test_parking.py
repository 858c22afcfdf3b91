"""State that is parked between updates changes nothing, bit for bit, and what is lost in parking is seen."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.trainer.parking import NOTHING, StateMemory
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


def test_a_save_of_a_parked_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its storages are empty: what a checkpoint copied from them would be lost."""
    memory = StateMemory([], cast(Any, None))
    memory.resident = NOTHING
    checkpointer: Any = object.__new__(Checkpointer)
    checkpointer.policy, checkpointer.newest = SimpleNamespace(memory=memory), None
    monkeypatch.setattr(Checkpointer, "poll", lambda *_, **__: True)
    with pytest.raises(RuntimeError, match=r"gradients.*weights are parked in host memory"):
        checkpointer.copy(3)
