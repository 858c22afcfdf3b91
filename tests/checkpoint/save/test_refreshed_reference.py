"""A reference that has taken the policy's weights: which they are, in every layout, and exactly those after a load."""

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.format.megatron_files import MegatronDirectory
from tests.support.models.tensors import merge
from tests.support.trainer.rank_fixtures import OnRanks

pytestmark = pytest.mark.world

TP2, PP2, EP2 = {"tensor": 2}, {"pipeline": 2}, {"expert": 2}
Saved = Callable[..., tuple[Path, list[dict[str, Any]]]]
SAVE = "training.refresh:refresh_and_save"


def whole(results: list[dict[str, Any]], *names: str) -> dict[str, torch.Tensor]:
    """The weights of all ranks together, found by the names one after the other."""
    return merge([reduce(lambda found, name: found[name], names, result) for result in results])


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("ranks", "model", "layout"),
    [
        (2, "dense", {}),
        (2, "dense", TP2),
        (2, "tied", PP2),
        (2, "moe", EP2),
        pytest.param(2, "dense", PP2 | {"virtual_pipeline": 2}, marks=pytest.mark.slow),
        pytest.param(4, "dense", TP2 | PP2, marks=pytest.mark.slow),
    ],
)
def test_the_reference_has_the_weights_of_the_step_at_which_it_took_them(
    saved: Saved, ranks: int, model: str, layout: dict[str, Any]
) -> None:
    _, got = saved(SAVE, ranks, model, layout)
    assert got[0]["due"] == [False, True, False, True]
    assert [got[0][f"reference {step}"]["step"] for step in range(1, 5)] == [0, 2, 2, 4]
    first = whole(got, "first", "weights")
    assert equal(whole(got, "reference 1", "weights"), first)
    for step, taken in ((2, 2), (3, 2), (4, 4)):
        weights = whole(got, f"reference {step}", "weights")
        assert equal(weights, whole(got, f"policy {taken}")) and not equal(weights, first)
    moved = [
        float((found["reference 3"]["logprobs"][key] - value).abs().max())
        for found in got
        for key, value in found["first"]["logprobs"].items()
    ]
    assert max(moved) > 1e-3, "other weights would not have been noticed"


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        ((2, {}), (2, {}), "dense"),
        ((2, TP2), (2, PP2), "dense"),
        ((2, EP2), (1, {}), "moe"),
        pytest.param((2, PP2), (2, TP2), "tied", marks=pytest.mark.slow),
        pytest.param((2, {}), (4, TP2 | PP2), "dense", marks=pytest.mark.slow),
    ],
)
def test_a_load_brings_the_reference_back(
    on_ranks: OnRanks, saved: Saved, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]], model: str
) -> None:
    root, unbroken = saved(SAVE, before[0], model, before[1])
    got = on_ranks(after[0], "training.refresh:resume", model, layout=after[1], root=root)
    assert all(found["reference 3"]["step"] == 2 and found["reference 4"]["step"] == 4 for found in got)
    assert equal(whole(got, "policy 3"), whole(unbroken, "policy 3"))
    assert equal(whole(got, "reference 3", "weights"), whole(unbroken, "reference 3", "weights"))
    if before == after:  # what the training makes of it too
        for mine, theirs in zip(got, unbroken, strict=True):
            assert equal(mine["reference 3"]["logprobs"], theirs["reference 3"]["logprobs"])
            assert equal(mine["reference 4"]["weights"], theirs["reference 4"]["weights"])


def test_a_run_without_a_reference_and_a_reader_of_weights_leave_it_alone(on_ranks: OnRanks, saved: Saved) -> None:
    root, unbroken = saved(SAVE, 2, "dense", {})
    got = on_ranks(1, "training.refresh:resume", layout={}, root=root, algorithm__kl__coef=0.0)
    assert equal(whole(got, "policy 3"), whole(unbroken, "policy 3"))
    (step,) = root.glob("iter_*")
    model = MegatronDirectory(step)
    assert any(key.startswith("reference.") for key in model.index)
    for name, value in whole(unbroken, "policy 3").items():
        assert torch.equal(model.rows(name, 0, len(value)), value)
