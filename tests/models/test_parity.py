"""Log-probs of packed micro-batches under every layout against `transformers`, in fp32: max |Δ| <= 1e-5.

Gated DeltaNet: 3e-5, for `transformers` itself is as far from fp64. Both rules take the decay between two tokens as the
difference of two sums over a chunk, whose rounding in fp32 makes most of what either is off.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models.families import FAMILIES
from megarl.models.hf.read_config import load_info
from tests.support.models.family_models import MODELS, MOE, VISION, Batch
from tests.support.models.tiny import DELTA
from tests.support.ranks.models.reversed_rules import active_rules
from tests.support.worlds.world import World

pytestmark = pytest.mark.world
TOLERANCES = dict.fromkeys(MODELS, 1e-5) | dict.fromkeys(DELTA, 3e-5)

DENSE_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),  # TP 1, two replicas
    (2, {"tensor": 2}),
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
    (4, {"tensor": 4, "sequence": True}),  # more ranks than key/value heads
    (4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    (2, {"pipeline": 2, "first_stage_layers": 1}),
    (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Ett|t|t|L"}),
]
MOE_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"tensor": 2, "sequence": True}),
    (2, {"expert": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
    (4, {"tensor": 2, "sequence": True, "expert": 2}),
    (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
    (4, {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 1}),
    (4, {"pipeline": 2, "expert": 2}),
    (2, {"pipeline": 2, "last_stage_layers": 1}),
    (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "E|tt|t|tL"}),
]
# Of the product, `make test` runs each layout at least once and each model on several ranks.
FAST: dict[str, tuple[int, ...]] = {
    "llama": (0, 1, 5),
    "llama2": (1, 7),
    "mistral": (2, 3),
    "mistral_full": (1,),
    "mixtral": (1, 2),
    "qwen2": (1, 4, 6),
    "qwen2_yarn": (2,),
    "qwen3": (0, 2, 3, 8),
    "qwen3_yarn": (1,),
    "qwen3_moe": (0, 4, 5, 7),
    "deepseek_v3": (0, 1, 2, 3, 9),
    "moonlight": (1,),
    "glm4_moe": (1, 2, 8),
    "glm4_moe_air": (3,),
    "glm4_moe_lite": (1,),
    "qwen3_5": (0, 1, 2, 3),
    "qwen3_5_moe": (1, 2),
    "qwen3_next": (1, 3),
}


def _cases() -> list[Any]:
    cases = []
    for model, fast in FAST.items():
        for i, (ranks, sizes) in enumerate(MOE_LAYOUTS if model in MOE else DENSE_LAYOUTS):
            name = "-".join([model, *(f"{key}{value}" for key, value in sizes.items())])
            marks = [] if i in fast else [pytest.mark.slow]
            cases.append(pytest.param(model, ranks, sizes, id=name, marks=marks))
    return cases


def test_every_model_is_compared() -> None:
    assert set(FAST) == set(MODELS)
    assert {family for family, _ in MODELS.values()} | set(VISION) == set(FAMILIES)


@pytest.mark.parametrize(("family", "ranks", "sizes"), _cases())
def test_logprobs_equal_transformers(
    family: str,
    ranks: int,
    sizes: dict[str, Any],
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    reference: Callable[[str], list[torch.Tensor]],
    batch: Batch,
) -> None:
    results = world(ranks).run(
        "tests.support.ranks.models.models:logprobs", model_dir=str(model_dir(family)), batch=batch, **sizes
    )
    answers = [result for result in results if result is not None]
    assert len(answers) == ranks // sizes.get("pipeline", 1)
    for answer in answers:
        for ours, theirs in zip(answer, reference(family), strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= TOLERANCES[family]


def test_mistakes_with_delta_net_show(
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    reference: Callable[[str], list[torch.Tensor]],
    batch: Batch,
) -> None:
    results = world(2).run(
        "tests.support.ranks.models.delta_mistakes:mistaken_logprobs", model_dir=str(model_dir("qwen3_5")), batch=batch
    )
    answers = {name: answer for result in results for name, answer in result.items()}
    assert len(answers) == 4
    for answer in answers.values():
        gaps = [(ours - theirs).abs().max() for ours, theirs in zip(answer, reference("qwen3_5"), strict=True)]
        assert max(gaps) > 10 * TOLERANCES["qwen3_5"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "qwen3_moe"])
def test_bf16_is_close(
    family: str,
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    reference: Callable[[str], list[torch.Tensor]],
    batch: Batch,
) -> None:
    """This is not parity, because bf16 rounds every activation; but a wrong rule moves log-probs by whole units."""
    results = world(2).run(
        "tests.support.ranks.models.models:logprobs",
        model_dir=str(model_dir(family)),
        batch=batch,
        precision="bf16",
        tensor=2,
        sequence=True,
    )
    for ours, theirs in zip(results[0], reference(family), strict=True):
        gap = (ours - theirs).abs()
        assert 1e-4 < gap.mean() < 0.1


# What a family's later model is made by and its earlier ones are not: an untied output layer, uncompressed queries.
BROKEN = {model: () for model, (family, _) in MODELS.items() if model == family} | {
    "qwen2_yarn": ("output_layer.weight",),
    "moonlight": ("decoder.layers.{layer}.self_attention.linear_q_proj.weight",),
}


def test_every_rule_of_every_family_is_broken_in_turn(model_dir: Callable[[str], Path]) -> None:
    broken: dict[str, set[str]] = {family: set() for family in FAMILIES}
    made: dict[str, set[str]] = {family: set() for family in FAMILIES}
    for model, (family, _) in MODELS.items():
        rules = active_rules(load_info(model_dir(model)))
        made[family] |= set(rules)
        if model in BROKEN:
            broken[family] |= set(BROKEN[model] or rules)
    assert broken == made
    assert set.union(*made.values()) == {rule.megatron for family in FAMILIES.values() for rule in family.rules}


@pytest.mark.slow
@pytest.mark.parametrize("model", BROKEN)
def test_each_rule_shows_in_the_logprobs(
    model: str,
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    reference: Callable[[str], list[torch.Tensor]],
    batch: Batch,
) -> None:
    rules = BROKEN[model] or active_rules(load_info(model_dir(model)))
    few = batch[:1]
    results = world(2).run(
        "tests.support.ranks.models.reversed_rules:reversed_logprobs",
        model_dir=str(model_dir(model)),
        batch=few,
        rules=list(rules),
    )
    answers = {rule: answer for result in results for rule, answer in result.items()}
    gaps = {rule: float((answer[0] - reference(model)[0]).abs().max()) for rule, answer in answers.items()}
    assert set(gaps) == set(rules)
    assert {rule: gap for rule, gap in gaps.items() if not gap > 10 * TOLERANCES[model]} == {}
