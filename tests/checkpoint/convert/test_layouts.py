"""Converted checkpoints through every layout and back, bit for bit: pairwise here, in full under `slow`."""

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from megarl.models.families import FAMILIES
from tests.support.checkpoints.converter import convert
from tests.support.models.tensors import differing
from tests.support.worlds.world import World

pytestmark = pytest.mark.world

AXES = {"tensor": (1, 2, 4), "pipeline": (1, 2), "virtual_pipeline": (1, 2), "expert": (1, 2)}
Sizes = tuple[int, int, int, int]
# Every pair of values of two axes occurs in one of these; the family that goes through it. Two pairs (TP4 with PP2 and
# with VPP2) need eight ranks, 5 GB of processes: they are in the last one, under `slow`.
PAIRWISE: dict[Sizes, str] = {
    (4, 1, 1, 1): "qwen3_moe",
    (4, 1, 1, 2): "qwen3_moe",
    (2, 2, 2, 1): "qwen2",
    (2, 1, 1, 2): "qwen3_moe",
    (1, 2, 2, 1): "llama",
    (1, 1, 1, 2): "mixtral",
    (1, 2, 1, 1): "qwen3",
    (1, 2, 2, 2): "qwen3_moe",
    (4, 2, 2, 2): "qwen3_moe",
}
FAST_RANKS = 4
# Families that the covering does not take: on two ranks here, on four under `slow`.
OTHERS: list[tuple[str, Sizes]] = [
    ("deepseek_v3", (2, 1, 1, 1)),
    ("deepseek_v3", (1, 2, 1, 1)),
    ("deepseek_v3", (1, 1, 1, 2)),
    ("glm4_moe", (1, 1, 1, 2)),
    ("glm4_moe_lite", (1, 2, 1, 1)),
    ("mistral", (2, 1, 1, 1)),
    ("qwen3_5", (2, 1, 1, 1)),
    ("qwen3_5_moe", (1, 1, 1, 2)),
    ("qwen3_next", (1, 2, 1, 1)),
    ("qwen2_5_vl", (2, 1, 1, 1)),
    ("qwen3_vl", (1, 2, 1, 1)),
    ("qwen3_vl_moe", (1, 1, 1, 2)),
    ("qwen2_5_vl", (2, 2, 2, 1)),
    ("deepseek_v3", (2, 2, 2, 2)),
    ("glm4_moe", (2, 2, 2, 2)),
    ("glm4_moe_lite", (2, 2, 2, 2)),
    ("mistral", (2, 2, 2, 1)),
    ("qwen3_5", (2, 2, 2, 1)),
    ("qwen3_next", (2, 2, 2, 2)),
]


def possible() -> list[Sizes]:
    """Interleaving needs a pipeline."""
    return [sizes for sizes in product(*AXES.values()) if sizes[1] > 1 or sizes[2] == 1]


def test_the_covering_is_pairwise() -> None:
    def pairs(all_sizes: list[Sizes]) -> set[Any]:
        return {(i, s[i], j, s[j]) for s in all_sizes for i, j in combinations(range(len(AXES)), 2)}

    fast = [sizes for sizes in PAIRWISE if layout_of(sizes)[0] <= FAST_RANKS]
    assert pairs(fast) == pairs([sizes for sizes in possible() if layout_of(sizes)[0] <= FAST_RANKS])
    assert pairs(list(PAIRWISE)) == pairs(possible())


def layout_of(sizes: Sizes) -> tuple[int, dict[str, Any]]:
    """Ranks, and the layout. Experts share the ranks of tensor parallelism where there are enough."""
    tensor, pipeline, virtual, expert = sizes
    layout: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    if virtual > 1:
        layout["virtual_pipeline"] = virtual
    if expert > 1:
        layout["expert_tensor"] = max(1, tensor // expert)
    if tensor > 1:
        layout["sequence"] = True
    return max(tensor, expert) * pipeline, layout


def _cases() -> list[Any]:
    cases = []
    for sizes in possible():
        families = ["qwen3_moe"] if sizes[3] > 1 else ["qwen2", "qwen3", "qwen3_moe"]
        for family in dict.fromkeys([*families, *([PAIRWISE[sizes]] if sizes in PAIRWISE else [])]):
            fast = PAIRWISE.get(sizes) == family and layout_of(sizes)[0] <= FAST_RANKS
            marks = [] if fast else [pytest.mark.slow]
            name = "tp{}-pp{}-vpp{}-ep{}".format(*sizes)
            cases.append(pytest.param(family, sizes, id=f"{family}-{name}", marks=marks))
    for family, sizes in OTHERS:
        marks = [] if layout_of(sizes)[0] <= 2 else [pytest.mark.slow]
        cases.append(pytest.param(family, sizes, id="{}-tp{}-pp{}-vpp{}-ep{}".format(family, *sizes), marks=marks))
    return cases


def test_every_family_goes_through_a_layout() -> None:
    fast = {case.values[0] for case in _cases() if pytest.mark.slow not in case.marks}
    assert fast == set(FAMILIES)


@pytest.mark.parametrize(("family", "sizes"), _cases())
def test_through_a_layout_and_back(
    family: str, sizes: Sizes, model_dir: Callable[[str], Path], world: Callable[[int], World], tmp_path: Path
) -> None:
    """The layout loads an import and saves it; the export of that, and the weight sync's, are compared."""
    source = model_dir(family)
    convert("import", "--hf", source, "--out", tmp_path / "megatron")
    ranks, layout = layout_of(sizes)
    world(ranks).run(
        "tests.support.ranks.checkpoints.checkpoints:load_save_and_export",
        checkpoint=str(tmp_path / "megatron"),
        step=str(tmp_path / "iter_0000003"),
        out=str(tmp_path / "sync"),
        **layout,
    )
    convert("export", "--megatron", tmp_path / "iter_0000003", "--hf", tmp_path / "back")
    assert differing(source, tmp_path / "back") == []
    assert differing(source, tmp_path / "sync") == []
