"""The choices for `auto`: the cheapest recomputation, the largest micro-batch, with a tenth of the memory free."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.common.errors import ConfigError
from megarl.common.values import GIB
from megarl.config.derived.pools import trainer_layout
from megarl.config.loading.load import config_from_tree
from megarl.config.megatron.reserved import transformer_fields
from megarl.config.memory_plan.memory import (
    MOST_TOKENS,
    TOKENS_STEP,
    Device,
    resolve_auto,
    trainer_memory,
)
from megarl.config.memory_plan.parameters import TrainerRank
from megarl.config.memory_plan.plan import RunPlan, make_plan
from megarl.config.schema import Config, MegatronConfig
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.layout import Layout
from tests.support.checkout import ROOT
from tests.support.trainer.configs import config

RECIPES = sorted(path for path in (ROOT / "examples/rl/configs").glob("*.yaml") if not path.stem.endswith("_cpu"))
RECOMPUTES_ALL = {"deepseek_v3_gsm8k_64x256"}  # as published: a stage of four layers holds 16 micro-batches
SHAPE = ROOT / "examples/rl/models/Qwen3-8B"
LONGEST = 2560


def resolved(gib: float | None, tokens: int | str = "auto", *, cuda: bool = True, **changes: Any) -> Config:
    chosen = config(SHAPE, trainer__micro_batch_tokens=tokens, trainer__precision="bf16", **changes)
    limit = None if gib is None else int(gib * GIB)
    found = resolve_auto(rank_of(chosen), Device(cuda, True, limit), LONGEST)
    return chosen.model_copy(update={"trainer": found.trainer})


def rank_of(chosen: Config) -> TrainerRank:
    return TrainerRank.of(chosen, load_info(SHAPE), LAYOUT, fused=True)


LAYOUT = Layout(tensor=4, sequence=True, world_size=8)
LAYERS = 36
ORDER = ["none", "selective", *range(1, LAYERS), "full"]


def peak(chosen: Config, **changes: Any) -> int:
    return trainer_memory(rank_of(chosen).with_trainer(**changes), Device(True, True, 1)).peak


@settings(deadline=None, max_examples=40)
@given(gib=st.floats(20, 140), tokens=st.integers(LONGEST, 20000))
def test_the_cheapest_recomputation_that_leaves_a_tenth_free(gib: float, tokens: int) -> None:
    chosen = resolved(gib, tokens)
    limit = 0.9 * int(gib * GIB)
    kind = chosen.trainer.recompute
    cheaper = ORDER[: ORDER.index(kind)]
    assert all(peak(chosen, recompute=other) > limit for other in cheaper[:2] + cheaper[-1:]), kind
    assert kind == "full" or peak(chosen) <= limit


@settings(deadline=None, max_examples=40)
@given(gib=st.floats(20, 140))
def test_the_largest_micro_batch_that_leaves_a_tenth_free(gib: float) -> None:
    chosen = resolved(gib)
    limit, tokens = 0.9 * int(gib * GIB), chosen.trainer.token_limit
    assert tokens >= LONGEST
    if tokens == LONGEST:  # the longest sample is never split, whether or not it leaves a tenth free
        assert peak(chosen, micro_batch_tokens=LONGEST + TOKENS_STEP) > limit
    else:
        assert tokens % TOKENS_STEP == 0 and peak(chosen) <= limit
        assert tokens == MOST_TOKENS or peak(chosen, micro_batch_tokens=tokens + TOKENS_STEP) > limit


def test_without_known_memory() -> None:
    on_cpu, on_gpu = resolved(None, cuda=False), resolved(None, cuda=True)
    assert (on_cpu.trainer.recompute, on_gpu.trainer.recompute) == ("none", "full")
    assert on_cpu.trainer.token_limit == on_gpu.trainer.token_limit == 8192
    assert resolved(None, 4096, cuda=False).trainer.token_limit == 4096


@pytest.mark.parametrize(
    "given_fields", [{"trainer__recompute": 3}, {"megatron__transformer": {"recompute_granularity": None}}]
)
def test_what_the_user_chose_stays(given_fields: dict[str, Any]) -> None:
    before = config(SHAPE, **given_fields).trainer.recompute
    assert resolved(400, 4096, **given_fields).trainer.recompute == before


def test_a_resolved_config_is_resolved() -> None:
    once = resolved(79)
    again = resolve_auto(rank_of(once), Device(True, True, 200 * GIB), LONGEST)
    assert again.trainer == once.trainer and "auto" not in (once.trainer.recompute, once.trainer.micro_batch_tokens)


def test_two_settings_of_one_thing_are_refused(models: dict[str, Path]) -> None:
    both = config(
        models["qwen3"], trainer__recompute="none", megatron__transformer={"recompute_granularity": "selective"}
    )
    with pytest.raises(ConfigError, match=r"trainer\.recompute: megatron\.transformer has recompute fields as well"):
        make_plan(both, device="cpu", files=False)


@pytest.mark.parametrize(
    ("recompute", "fields"),
    [
        ("auto", {}),
        ("none", {}),
        ("selective", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
        (5, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5}),
        ("full", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ],
)
def test_the_fields_that_megatron_gets(models: dict[str, Path], recompute: Any, fields: dict[str, Any]) -> None:
    chosen = config(models["qwen3"], trainer__recompute=recompute)
    assert transformer_fields(chosen.trainer, chosen.megatron) == fields
    passed = {"recompute_granularity": None}
    assert transformer_fields(chosen.trainer, MegatronConfig(transformer=passed)) == fields | passed


@functools.cache
def planned(path: Path) -> RunPlan:
    return make_plan(config_from_tree(yaml.safe_load(path.read_text())), device="cuda", files=False)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_leaves_the_choice_to_the_plan_and_a_tenth_free(path: Path) -> None:
    found = planned(path)
    assert found.trainer.limit is not None and found.trainer.peak <= 0.9 * found.trainer.limit
    assert found.engine.memory.limit is not None and found.engine.memory.peak <= 0.9 * found.engine.memory.limit
    if found.shared is not None:
        assert found.shared.memory.limit is not None and found.shared.memory.peak <= 0.9 * found.shared.memory.limit
    assert found.config.trainer.recompute != "auto"
    assert (found.config.trainer.recompute == "full") == (path.stem in RECOMPUTES_ALL)
    assert found.config.trainer.token_limit >= found.max_sequence_tokens


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_figures_of_the_recipes_page_are_those_of_the_plan(path: Path) -> None:
    found = planned(path)
    kind, layers = found.config.trainer.recompute, found.info.num_layers
    peaks = [memory.peak / GIB for memory in (found.trainer, found.engine.memory)]
    if found.shared is not None:  # with what the other side keeps
        peaks = [found.shared.memory.total(turn) / GIB for turn in ("train", "generate")]
    stages = trainer_layout(found.config.trainer.parallel, found.config.trainer.gpus).stage_layers(layers)
    first = {"none": 0, "full": layers}.get(str(kind), kind)  # of each stage
    recomputed = sum(min(first, held) for held in stages)
    row = (
        f"| `{path.stem}` | {found.config.trainer.token_limit} | {recomputed} of {layers} "
        f"| {peaks[0]:.1f} | {peaks[1]:.1f} |"
    )
    assert row in (ROOT / "docs/scaling/recipes.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("section", "key", "value", "turn", "fix"),
    [
        ("rollout", "gpu_memory_utilization", 0.92, "generate", "lower rollout.gpu_memory_utilization"),
        ("trainer", "micro_batch_tokens", 400_000, "train", "lower trainer.micro_batch_tokens, or use more GPUs"),
        ("weight_sync", "bucket_mb", 20_000, "publish", "lower weight_sync.bucket_mb, or use more GPUs"),
    ],
)
def test_a_turn_of_shared_gpus_that_does_not_fit_is_refused_with_the_numbers(
    section: str, key: str, value: Any, turn: str, fix: str
) -> None:
    tree = yaml.safe_load((ROOT / "examples/rl/configs/qwen3_8b_gsm8k_8_shared.yaml").read_text())
    tree[section][key] = value
    with pytest.raises(ConfigError) as refused:
        make_plan(config_from_tree(tree), device="cuda", files=False)
    problem = rf"share_gpus: ([\d.]+) GiB per GPU in turn '{turn}', of 79.00 GiB, .*: {fix}"
    found = re.search(problem, str(refused.value))
    assert found is not None and float(found[1]) > 79
