"""A rank's flat part of a parameter as boxes; and that a save holds a rank's own part, not its group's."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.save.optimizer_shards import rectangles
from tests.support.worlds.world import World

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_range_in_flat_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start, end = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    whole = torch.arange(numel).view(shape)
    boxes = rectangles(shape, start, end)
    found = [
        whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].flatten() for box in boxes
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, end))
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_ranges_of_all_ranks_cover_a_parameter_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    cuts = sorted([0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))])
    seen = torch.zeros(shape, dtype=torch.int64)
    for start, end in itertools.pairwise(cuts):
        for box in rectangles(shape, start, end):
            seen[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    assert bool((seen == 1).all())


@pytest.mark.world
@pytest.mark.parametrize(("ranks", "model", "layout"), [(2, "dense", {}), (2, "moe", {}), (4, "dense", {"tensor": 2})])
def test_a_rank_saves_and_loads_its_own_part_in_place(
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    ranks: int,
    model: str,
    layout: dict[str, Any],
) -> None:
    """Megatron's own format holds `data-parallel size` times as much on every rank."""
    arguments = {"model_dir": model_dir(model), "layout": layout}
    results = world(ranks).run("tests.support.ranks.checkpoints.saving:optimizer_parts", **arguments)
    for result in results:
        assert result["elements"] == 3 * result["held"] and result["views"]
    parts = ranks // layout.get("tensor", 1)
    assert all(result["held"] < 1.2 * result["parameters"] / parts for result in results)
