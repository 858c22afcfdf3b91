"""A load gives what was saved: bit for bit in the same layout, to the layouts' own rounding in any other."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.save.checkpointer import FIRST_SAVE_S, is_affordable
from tests.support.checkout import PROMPTS
from tests.support.models.tensors import merge
from tests.support.trainer.rank_fixtures import OnRanks
from tests.support.worlds.world import World

pytestmark = pytest.mark.world

DEVIATION = 1e-4  # of the weights, relative to what the updates after the resume have changed
TP2, CP2, PP2, EP2 = {"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"expert": 2}
PLAIN = {"trainer__optimizer__distributed": False}
BUCKETS = {"megatron__ddp": {"overlap_grad_reduce": True, "bucket_size": 20000}}  # several, padded behind
BF16 = {"trainer__precision": "bf16"}
BIAS = {"megatron__transformer": {"moe_router_bias_update_rate": 0.01}}
Saved = Callable[..., tuple[Path, list[dict[str, Any]]]]
SAVING = "checkpoints.saving"


def test_a_planned_save_takes_a_fiftieth_of_the_time_since_the_last_one() -> None:
    assert [is_affordable(since, 2.0) for since in (0.0, 99.9, 100.0, 1e6)] == [False, False, True, True]
    assert not is_affordable(299.0, FIRST_SAVE_S) and is_affordable(300.0, FIRST_SAVE_S)


def test_the_clock_of_the_first_rank_plans_the_saves_of_all(
    world: Callable[[int], World], model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    results = world(2).run(
        "tests.support.ranks.checkpoints.saving:planned_saves", timeout=120, model_dir=model_dir("dense"), root=tmp_path
    )
    # The third by the clock, the fifth because keep_every wants it, the last one always.
    assert results == [[False, False, True, False, True, False, False, True]] * 2


def equal(first: Any, second: Any) -> bool:
    """Bit for bit, through dicts, lists and tuples."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(equal(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


@pytest.mark.parametrize(
    ("ranks", "model", "layout", "changes"),
    [
        pytest.param(2, "dense", {}, {}, marks=pytest.mark.slow),
        (2, "tied", PP2, {}),
        (2, "dense", TP2, BF16),
        (2, "delta", TP2, BF16),
        pytest.param(2, "latent", EP2, BIAS, marks=pytest.mark.slow),
        pytest.param(2, "dense", {}, PLAIN, marks=pytest.mark.slow),
        pytest.param(2, "dense", {}, BUCKETS, marks=pytest.mark.slow),
        pytest.param(2, "dense", {}, BF16 | PLAIN, marks=pytest.mark.slow),
        pytest.param(2, "moe", PP2, {}, marks=pytest.mark.slow),
        pytest.param(4, "moe", EP2 | TP2 | {"sequence": True}, {}, marks=pytest.mark.slow),
        pytest.param(4, "dense", TP2, {}, marks=pytest.mark.slow),
        pytest.param(4, "dense", CP2, BF16, marks=pytest.mark.slow),
    ],
)
def test_the_same_layout_goes_on_bit_for_bit(
    on_ranks: OnRanks, saved: Saved, ranks: int, model: str, layout: dict[str, Any], changes: dict[str, Any]
) -> None:
    root, unbroken = saved(f"{SAVING}:save_and_go_on", ranks, model, layout, **changes)
    resumed = on_ranks(ranks, f"{SAVING}:resume_and_go_on", model, layout=layout, root=root, **changes)
    for before, after in zip(unbroken, resumed, strict=True):
        assert after["record"]["note"] == "kept" and after["record"]["step"] == 3
        for part in before["saved"]:
            assert equal(before["saved"][part], after["saved"][part]), part
            assert equal(before["end"][part], after["end"][part]), part
        assert before["metrics"] == after["metrics"]


@pytest.mark.parametrize(("ranks_per_host", "shared"), [(2, 0), (1, 1)])
def test_ranks_of_several_hosts_read_for_each_other(
    on_ranks: OnRanks, saved: Saved, ranks_per_host: int, shared: int
) -> None:
    root, unbroken = saved(f"{SAVING}:save_and_go_on", 2, "dense", {})
    resumed = on_ranks(2, f"{SAVING}:resume_on", ranks_per_host=ranks_per_host, layout={}, root=root)
    for before, after in zip(unbroken, resumed, strict=True):
        assert after["shared"] == shared
        assert all(equal(before[when][part], after[when][part]) for when in ("saved", "end") for part in before[when])


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        ((2, TP2), (2, PP2), "dense"),
        ((2, TP2), (2, PP2), "delta"),
        pytest.param(
            (2, EP2 | TP2 | {"sequence": True, "expert_tensor": 1}), (2, PP2), "delta_moe", marks=pytest.mark.slow
        ),
        pytest.param((2, PP2), (2, EP2), "delta_next", marks=pytest.mark.slow),
        pytest.param((2, EP2), (2, PP2 | {"last_stage_layers": 1}), "glm", marks=pytest.mark.slow),
        pytest.param((2, PP2), (2, EP2), "glm_lite", marks=pytest.mark.slow),
        pytest.param((2, {}), (1, {}), "dense", marks=pytest.mark.slow),
        ((2, EP2), (1, {}), "moe"),
        pytest.param((1, {}), (2, TP2 | {"sequence": True}), "dense", marks=pytest.mark.slow),
        pytest.param((2, PP2), (2, TP2), "tied", marks=pytest.mark.slow),
        pytest.param((2, {}), (2, EP2), "moe", marks=pytest.mark.slow),
        pytest.param((2, PP2), (2, PP2 | {"virtual_pipeline": 2}), "dense", marks=pytest.mark.slow),
        pytest.param((2, PP2 | {"last_stage_layers": 1}), (2, PP2), "dense", marks=pytest.mark.slow),
        ((2, PP2), (2, PP2 | {"virtual_pipeline": 2, "pipeline_layout": "Ett|t|t|L"}), "dense"),
        pytest.param((2, PP2 | {"pipeline_layout": "Et|tttL"}), (2, EP2), "moe", marks=pytest.mark.slow),
        pytest.param((4, EP2 | TP2 | {"sequence": True}), (2, PP2), "moe", marks=pytest.mark.slow),
        pytest.param((2, TP2), (4, TP2), "dense", marks=pytest.mark.slow),
        ((2, CP2), (1, {}), "dense"),
        pytest.param((1, {}), (2, CP2), "dense", marks=pytest.mark.slow),
        pytest.param((2, CP2 | EP2), (4, {"context": 4}), "moe", marks=pytest.mark.slow),
        pytest.param((4, CP2 | TP2), (4, PP2 | CP2), "dense", marks=pytest.mark.slow),
    ],
)
def test_another_layout_goes_on_as_closely_as_layouts_agree(
    on_ranks: OnRanks, saved: Saved, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]], model: str
) -> None:
    root, unbroken = saved(f"{SAVING}:save_and_go_on", before[0], model, before[1])
    ranks, layout = after
    resumed = on_ranks(ranks, f"{SAVING}:resume_and_go_on", model, layout=layout, root=root)
    assert any("the layout differs" in line for line in resumed[0]["said"])
    start = merge([result["saved"]["weights"] for result in unbroken])
    end = merge([result["end"]["weights"] for result in unbroken])
    assert equal(merge([result["saved"]["weights"] for result in resumed]), start)
    got = merge([result["end"]["weights"] for result in resumed])
    for name, value in end.items():
        moved = float((value - start[name]).norm())
        assert (moved > 0) == (not name.endswith("e_score_correction_bias")), name  # which no gradient moves
        assert float((got[name] - value).norm()) <= DEVIATION * moved, name


@pytest.mark.parametrize(("before", "after"), [({}, PLAIN), (PLAIN, {})])
def test_a_distributed_optimizer_and_a_whole_one_load_each_other(
    on_ranks: OnRanks, saved: Saved, before: dict[str, Any], after: dict[str, Any]
) -> None:
    root, unbroken = saved(f"{SAVING}:save_and_go_on", 2, "dense", {}, **before)
    resumed = on_ranks(2, f"{SAVING}:resume_and_go_on", layout={}, root=root, **after)
    assert [each["prepared"] for each in resumed] == [[3], []], "rank 0 prepares for the checkpoint that is loaded"
    for was, now in zip(unbroken, resumed, strict=True):
        assert equal(was["saved"]["weights"], now["saved"]["weights"])
        assert equal(was["saved"]["numbers"], now["saved"]["numbers"])
        for name, value in was["end"]["weights"].items():
            moved = float((value - was["saved"]["weights"][name]).norm())
            assert float((now["end"]["weights"][name] - value).norm()) <= DEVIATION * moved, name


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, f"{SAVING}:full_disk", root=tmp_path)
    assert first["outcomes"] == second["outcomes"] == [True, False, False, True]
    assert first["steps"] == [1, 4]
    failures = [line for line in first["said"] if "could NOT be saved" in line]
    assert "step 2" in failures[0] and "rank 1" in failures[0] and "No space left" in failures[0]
    assert "step 3" in failures[1] and "newest checkpoint: step 1" in failures[1]
    (tmp_path / "file").write_text("")
    for result in on_ranks(2, f"{SAVING}:refused_target", root=tmp_path):
        assert result["saved"] is False and "could NOT be saved" in result["said"][0]


@pytest.mark.parametrize("later", [False, True])
def test_the_best_checkpoint_stays_alongside_the_newest(on_ranks: OnRanks, tmp_path: Path, later: bool) -> None:
    """So it does if evaluations end after the saves, as that of the last step does."""
    chosen = {"metric": "eval/held/greedy", "values": [0.2, 0.9, 0.5, None, 0.9], "later": later}
    results = on_ranks(2, f"{SAVING}:keep_best", root=tmp_path, **chosen)
    assert results == [[[1], [2], [2, 3], [2, 4], [2, 5]]] * 2


def test_a_save_does_not_sweep_what_a_timed_out_one_still_writes(on_ranks: OnRanks, tmp_path: Path) -> None:
    for result in on_ranks(2, f"{SAVING}:hanging_disk", root=tmp_path):
        assert result["outcomes"] == [False, False, True] and result["untouched"]
        assert result["failure"].startswith("the checkpoint of step 2 could not be saved: a rank is still writing")
        assert result["last"] is None


def test_checkpoints_of_another_history_are_set_aside(on_ranks: OnRanks, tmp_path: Path) -> None:
    for result in on_ranks(2, f"{SAVING}:histories", root=tmp_path / "checkpoints"):
        later = ["iter_0000002.rolled_back", "iter_0000003.rolled_back"]
        assert result["found"] == [(1, [1], later), (0, [], ["iter_0000001.replaced", *later])]


@pytest.mark.parametrize(
    ("other", "prompts", "message"),
    [
        ("tied", None, "belongs to another run.*tied"),
        ("dense", "as_many.jsonl", "data.path: its content differs"),
        ("dense", "gone.jsonl", r"/gone\.jsonl"),
    ],
)
def test_another_model_and_other_or_no_prompts_are_refused_on_every_rank(
    on_ranks: OnRanks, model_dir: Callable[[str], Path], tmp_path: Path, other: str, prompts: str | None, message: str
) -> None:
    (tmp_path / "as_many.jsonl").write_text(PROMPTS.read_text().replace("5", "6"))
    changes = {"data__path": tmp_path / prompts} if prompts else {}
    root = tmp_path / "checkpoints"
    for result in on_ranks(2, f"{SAVING}:contradiction", other=model_dir(other), root=root, **changes):
        assert len(result) == 1 and re.search(message, result[0], re.DOTALL), result
