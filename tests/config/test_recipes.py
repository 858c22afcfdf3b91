"""The recipes' asynchronous sections, and their CPU-sized twins: other sizes, the same algorithm."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.checks.sections import check
from megarl.config.derived.logprob_passes import correction_of, recomputes_old_logprobs
from megarl.config.derived.staleness import Pace, pace_of
from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config
from megarl.config.schema.data import EvalSetConfig
from megarl.rollout.tasks.toolbox import make_tool
from tests.support.runs.recipe_twins import RECIPES, differing_keys, recipe, twin
from tests.support.trainer.configs import with_changes

# What a twin may change, and nothing else: where things are, how many, how long, how long to wait for them, and what a
# CPU (precision) and a random model (a reward that it varies) need.
SIZES = {
    "run.dir", "run.steps", "model.path", "model.shape",
    "trainer.gpus", "trainer.gpus_per_node", "trainer.devices", "trainer.device_memory_gib", "trainer.precision",
    "trainer.parallel.tensor", "trainer.parallel.context", "trainer.parallel.expert", "trainer.parallel.pipeline",
    "trainer.parallel.pipeline_layout", "trainer.optimizer.warmup_steps",
    "algorithm.overlong.buffer_tokens", "batch.groups", "batch.samples_per_group", "sampling.max_tokens",
    "data.path", "data.max_prompt_tokens", "reward.function", "reward.workers", "evaluation.sets",
    "rollout.replicas", "rollout.tensor_parallel", "rollout.gpus_per_node", "rollout.devices",
    "rollout.device_memory_gib", "rollout.max_num_seqs", "rollout.group_deadline_s", "queue.storage_units",
    "timeouts.save_s", "timeouts.rpc_s", "timeouts.generate_s", "timeouts.weight_sync_s",
    "timeouts.engine_start_s",
}  # fmt: skip


def config_of(tree: dict[str, Any]) -> Config:
    return config_from_tree(tree)


@pytest.mark.parametrize("name", RECIPES)
def test_a_twin_differs_in_sizes_only(name: str, tmp_path: Path) -> None:
    whole, small = recipe(name), twin(name, tmp_path)
    assert differing_keys(whole, small) <= SIZES
    assert {"batch.groups", "sampling.max_tokens", "trainer.gpus", "model.path"} <= differing_keys(whole, small)
    of_recipe, of_twin = config_of(whole), config_of(small)
    sets = [[_without_sizes(each) for each in of.evaluation.sets] for of in (of_recipe, of_twin)]
    assert sets[0] == sets[1]
    assert pace_of(of_twin) == pace_of(of_recipe)
    assert correction_of(of_twin) == correction_of(of_recipe)
    assert recomputes_old_logprobs(of_twin) == recomputes_old_logprobs(of_recipe)


def _without_sizes(each: EvalSetConfig) -> EvalSetConfig:
    sampling = each.sampling.model_copy(update={"samples": None if each.sampling.samples is None else 2})
    return each.model_copy(update={"path": None, "sampling": sampling})


@pytest.mark.parametrize("name", RECIPES)
def test_a_twin_keeps_every_kind_of_parallelism_and_of_penalty(name: str, tmp_path: Path) -> None:
    """A size that is above 1 stays above 1, or the twin would not show what the recipe does."""
    whole, small = config_of(recipe(name)), config_of(twin(name, tmp_path))
    for size in ("tensor", "context", "pipeline", "expert"):
        of_recipe, of_twin = (getattr(each.trainer.parallel, size) for each in (whole, small))
        assert (of_recipe > 1) == (of_twin > 1), size
    assert (whole.algorithm.overlong.buffer_tokens > 0) == (small.algorithm.overlong.buffer_tokens > 0)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_waits_for_no_group_without_end(name: str) -> None:
    """At least three times what the longest response takes at 30 tokens per second, as docs/scaling/recipes.md says."""
    whole = config_of(recipe(name))
    deadline = whole.rollout.group_deadline_s
    assert pace_of(whole).runs_ahead is not whole.rollout.share_gpus and deadline is not None
    assert 3 * whole.sampling.max_tokens / 30 <= deadline <= whole.timeouts.generate_s / 2


WITHOUT_AIME = ("gsm8k", "geo3k", "128k")


@pytest.mark.parametrize("name", [name for name in RECIPES if not any(part in name for part in WITHOUT_AIME)])
def test_aime_is_measured_as_published(name: str) -> None:
    """The mean of 32 responses per problem, for ReTool of 30."""
    evaluation = config_of(recipe(name)).evaluation
    expected = 30 if "retool" in name else 32
    assert [each.sampling.samples or evaluation.sampling.samples for each in evaluation.sets] == [
        expected for each in evaluation.sets if each.name.startswith("aime")
    ]


@pytest.mark.sandbox
def test_the_tool_of_retool_is_set_as_published(tmp_path: Path) -> None:
    """verl's recipe/retool/sandbox_fusion_tool_config.yaml and retool.py, and its defaults for several turns."""
    for tree in (recipe("qwen2_5_7b_retool_4x4"), twin("qwen2_5_7b_retool_4x4", tmp_path)):
        config = config_of(tree)
        agent, [tool] = config.agent, config.tools
        assert (agent.max_turns, agent.max_calls_per_turn, agent.tool_timeout_s) == (16, 1, 30.0)
        assert (agent.max_tool_output_chars, agent.tool_output_cut) == (256, "middle")
        assert agent.tool_output_note == "...(truncated)..."
        assert agent.max_tool_calls >= agent.max_turns
        assert agent.max_tool_seconds >= agent.max_turns * agent.tool_timeout_s
        assert (tool.kind, tool.name) == ("python", "code_interpreter")
        assert tool.kwargs == {
            "description": "A tool for executing code.", "code_description": "The code to execute.",
            "timeout_s": 30, "cpu_s": 30, "memory_mib": 1024, "unfence": True, "print_last_line": True,
            "packages": ["numpy", "sympy"],
        }  # fmt: skip
        made = make_tool(tool, "tools.0")
        asyncio.run(made.close())


@pytest.mark.parametrize(
    ("name", "pace", "correction"),
    [
        ("qwen3_30b_a3b_grpo_96x32", Pace(1, 4, 5), "token_tis"),
        ("qwen3_30b_a3b_grpo_80x48", Pace(1, 4, 5), "token_tis"),
        ("qwen3_30b_a3b_128k_64", Pace(1, 1, 1), "token_tis"),
        ("qwen2_5_math_7b_dapo_4x4", Pace(1, 4, 5), None),
        ("qwen2_5_math_7b_dapo_32x32", Pace(1, 4, 5), None),
        ("qwen2_5_32b_grpo_64", Pace(1, 1, 4), "token_tis"),
        ("qwen2_5_7b_retool_4x4", Pace(1, 4, 5), "token_tis"),
        ("qwen2_5_vl_7b_geo3k_4x4", Pace(2, 8, 9), None),
        ("qwen3_8b_gsm8k_8", Pace(1, 1, 1), "token_tis"),
        ("qwen3_8b_gsm8k_8_shared", Pace(1, 1, 0, in_turns=True), None),
        ("qwen3_30b_a3b_grpo_16_shared", Pace(1, 1, 0, in_turns=True), None),
        ("glm4_5_air_grpo_64_shared", Pace(4, 4, 3, in_turns=True), None),
        ("qwen3_5_35b_a3b_grpo_32", Pace(4, 4, 7), "token_tis"),
        ("deepseek_v3_gsm8k_64x256", Pace(4, 4, 7), "token_tis"),
    ],
)
def test_how_far_each_recipe_runs_ahead(name: str, pace: Pace, correction: str | None) -> None:
    """96:32, 80:48 and DAPO are published with a sync after every 4 updates and half as many generated ahead."""
    chosen = config_of(recipe(name))
    assert pace_of(chosen) == pace
    found = correction_of(chosen)
    assert (found.kind if found else None) == correction
    assert chosen.admission.refill is ("dapo" in name)
    # Evaluations and checkpoints are at publications, where engines and trainer have the same weights.
    for every in (chosen.evaluation.every, chosen.checkpoint.every):
        assert every and every * pace.updates_per_step % pace.sync_interval == 0


@pytest.mark.parametrize("name", [name for name in RECIPES if "dapo" in name])
def test_the_settings_of_the_published_script_are_accepted(name: str) -> None:
    """The DAPO recipes' headers name them."""
    changes = {"run__steps": 200, "batch__groups": 128, "trainer__mini_batches": 4, "admission__sync_interval": 16,
               "admission__max_staleness": 23}  # fmt: skip
    assert pace_of(config_of(with_changes(recipe(name), changes))) == Pace(4, 16, 23)
    assert all(
        f"{key.replace('__', '.')}={value}" in RECIPES[name].read_text().partition("\nrun:")[0]
        for key, value in changes.items()
    )


def test_a_recipe_planned_outside_the_checkout_says_where_its_shape_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All relative paths start at the current directory, those of a recipe too."""
    monkeypatch.chdir(tmp_path)
    message = rf"^model\.shape: examples/.*config\.json not found: .* \(current directory: {tmp_path}; relative paths"
    with pytest.raises(ConfigError, match=message):
        check(config_of(recipe("qwen3_8b_gsm8k_8")), device="cuda", files=False)


def test_the_recipe_for_long_contexts_says_what_its_models_config_needs() -> None:
    """Trainer and engines read YaRN from config.json, which is published without it."""
    name = "qwen3_30b_a3b_128k_64"
    info = check(config_of(recipe(name)), device="cuda", files=False)
    header = RECIPES[name].read_text().partition("\nrun:")[0]
    assert info.rope_scaling is not None and info.max_positions == 131072
    for key in ("max_position_embeddings", "rope_scaling"):
        assert f'"{key}": {json.dumps(info.raw[key])}' in header
