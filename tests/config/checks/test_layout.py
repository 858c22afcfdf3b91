"""Layouts and passed fields that Megatron-Core cannot run or computes wrongly are refused; their neighbours pass."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.checks.layout import layout_problems, megatron_problems, model_problems, router_replay_problems
from megarl.models.hf.read_config import load_info
from tests.support.trainer.configs import config

Models = dict[str, Path]


def problems(model: Path, *, device: str = "cpu", **changes: Any) -> list[str]:
    """The problems that the checks of layouts, models and passed fields yield."""
    settings = config(model, **changes)
    found = [
        *layout_problems(settings.trainer),
        *model_problems(settings.trainer, settings.megatron, settings.rollout, load_info(model)),
        *router_replay_problems(settings, load_info(model)),
    ]
    return found + list(megatron_problems(settings.trainer, settings.megatron, device))


SIZES = st.sampled_from((1, 2, 3, 4))


@given(gpus=st.integers(1, 16), tensor=SIZES, context=SIZES, pipeline=SIZES, expert=SIZES)
def test_the_sizes_of_a_layout_must_divide_the_gpus(
    gpus: int, tensor: int, context: int, pipeline: int, expert: int
) -> None:
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
    parallel = {**sizes, "expert": expert, "expert_tensor": tensor}
    keys = [
        each.split(":")[0]
        for each in layout_problems(config("m", trainer={"gpus": gpus, "parallel": parallel}).trainer)
    ]
    expected = ["trainer.gpus"] * bool(gpus % (tensor * context * pipeline))
    assert keys == expected + ["trainer.parallel.expert"] * bool(gpus % (expert * tensor * pipeline))


LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"trainer__gpus": 3, "trainer__parallel": {"tensor": 2}}, "trainer.gpus: 3 is not a multiple"),
    (
        "qwen3",
        {"trainer__gpus": 2, "trainer__parallel": {"tensor": 2, "context": 2}},
        "trainer.gpus: 2 is not a multiple of parallel.tensor x parallel.context x parallel.pipeline = 2 x 2 x 1 = 4",
    ),
    ("qwen3_moe", {"trainer__gpus": 2, "trainer__parallel": {"expert": 4}}, "trainer.parallel.expert: 2 GPUs are not"),
    (
        "qwen3",
        {"trainer__parallel": {"sequence": True}},
        "trainer.parallel.sequence: sequence parallelism needs tensor",
    ),
    ("qwen3", {"trainer__parallel": {"virtual_pipeline": 2}}, "trainer.parallel.virtual_pipeline: needs pipeline > 1"),
    ("qwen3", {"trainer__gpus": 3, "trainer__parallel": {"tensor": 3}}, "4 attention heads cannot be split 3 ways"),
    (
        "qwen3",
        {"rollout__replicas": 1, "rollout__tensor_parallel": 3},
        "rollout.tensor_parallel: the model's 4 attention",
    ),
    ("qwen3", {"trainer__gpus": 3, "trainer__parallel": {"pipeline": 3}}, "4 layers cannot be split over 3 pipeline"),
    (
        "qwen3",
        {"trainer__gpus": 2, "trainer__parallel": {"pipeline": 2, "virtual_pipeline": 4}},
        "the 2 layers of a pipeline stage cannot be split into 4 virtual_pipeline",
    ),
    ("qwen3", {"trainer__parallel": {"last_stage_layers": 1}}, "trainer.parallel.last_stage_layers: needs pipeline"),
    (
        "qwen3",
        {"trainer__gpus": 2, "trainer__parallel": {"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 1}},
        "trainer.parallel.first_stage_layers: 2 layers cannot be split over 0",
    ),
    (
        "qwen3",
        {"trainer__parallel": {"pipeline_layout": "EttttL"}},
        "trainer.parallel.pipeline_layout: needs pipeline > 1; remove it",
    ),
    (
        "qwen3",
        {"trainer__gpus": 2, "trainer__parallel": {"pipeline": 2, "pipeline_layout": "Et|t|t|tL"}},
        "trainer.parallel.pipeline_layout: 'Et|t|t|tL' has 4 stages, but pipeline x virtual_pipeline is 2 x 1",
    ),
    (
        "qwen3",
        {"trainer__gpus": 2, "trainer__parallel": {"pipeline": 2, "pipeline_layout": "Et|ttL"}},
        "trainer.parallel.pipeline_layout: 'Et|ttL' has 3 layers (t); the model has 4",
    ),
    (
        "qwen3",
        {
            "trainer__gpus": 2,
            "trainer__parallel": {"pipeline": 2, "pipeline_layout": "Et|tttL", "last_stage_layers": 3},
        },
        "trainer.parallel.pipeline_layout: it sets every stage; remove last_stage_layers",
    ),
    ("qwen3", {"trainer__gpus": 2, "trainer__parallel": {"expert": 2}}, "this model has no experts"),
    ("qwen3_moe", {"trainer__gpus": 3, "trainer__parallel": {"expert": 3}}, "4 experts cannot be split 3 ways"),
    ("qwen3_moe", {"trainer__gpus": 2, "trainer__parallel": {"tensor": 2}}, "only with sequence parallelism"),
    (
        "qwen3_moe",
        {"trainer__gpus": 4, "trainer__parallel": {"tensor": 2, "sequence": True, "expert": 2}},
        "uneven all-gather",
    ),
    (
        "qwen3_vl",
        {"trainer__gpus": 4, "trainer__parallel": {"pipeline": 4}},
        "trainer.parallel.pipeline: the first 2 layers take image features (deepstack)",
    ),
    ("qwen2_5_vl", {"megatron__transformer": {"apply_rope_fusion": True}}, "the image positions of the first"),
]


R2: dict[str, Any] = {"trainer__router_replay": "r2", "algorithm__old_logprobs": "trainer"}
R3: dict[str, Any] = {"trainer__router_replay": "r3"}
LAYOUTS += [
    ("qwen3", R3, "trainer.router_replay: this model has no experts"),
    ("qwen3_moe", {**R3, "rollout__engine_kwargs": {"enable_prefix_caching": False}}, "r3 needs it true in vLLM"),
    ("qwen3_moe", {**R3, "rollout__engine_kwargs": {"decode_context_parallel_size": 2}}, "vLLM returns no experts"),
    (
        "qwen3_moe",
        {**R3, "rollout__engine_kwargs": {"worker_extension_cls": "a.B"}},
        "r3 uses it without a GPU; remove it",
    ),
    ("qwen3_moe", {**R3, "agent__loop": "harness"}, "responses that come through the gateway have no experts"),
    ("qwen3_moe", {**R3, "data__demonstration_field": "shown"}, "no engine has chosen experts for demonstrations"),
    ("qwen3", R2, "trainer.router_replay: this model has no experts"),
    ("qwen3_moe", {"trainer__router_replay": "r2"}, "this run makes none; set algorithm.old_logprobs=trainer"),
    ("qwen3_moe", {**R2, "megatron__transformer": {"moe_router_fusion": True}}, "the fused router replays nothing"),
    (
        "qwen3_moe",
        {**R2, "megatron__transformer": {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}},
        "routing by sinkhorn replays nothing",
    ),
    (
        "qwen3_moe",
        {"megatron__transformer": {"moe_enable_routing_replay": True}},
        "moe_enable_routing_replay: reserved; set trainer.router_replay",
    ),
]


@pytest.mark.parametrize(("family", "changes", "reported"), LAYOUTS, ids=lambda value: str(value)[:60])
def test_impossible_layouts(models: Models, family: str, changes: dict[str, Any], reported: str) -> None:
    assert any(reported in problem for problem in problems(models[family], **changes))


def test_a_first_stage_with_all_layers_of_deepstack_passes(models: Models) -> None:
    assert problems(models["qwen3_vl"], trainer__gpus=2, trainer__parallel={"pipeline": 2}) == []


def test_key_value_heads_may_be_fewer_than_ranks(models: Models) -> None:
    assert problems(models["qwen3"], trainer__gpus=4, trainer__parallel={"tensor": 4}) == []


MEGATRON: list[tuple[str, dict[str, Any], str]] = [
    ("transformer", {"recompute_granulariti": "full"}, "has no such field; did you mean recompute_granularity"),
    ("transformer", {"recompute_granularity": "fully"}, "must be Optional[Literal['full', 'selective']], not 'fully'"),
    ("transformer", {"recompute_num_layers": "1"}, "must be Optional[int]"),
    ("transformer", {"recompute_num_layers": True}, "must be Optional[int]"),
    ("transformer", {"moe_aux_loss_coeff": "a"}, "must be Union[float, List[float]]"),
    ("transformer", {"recompute_modules": "mlp"}, "must be Optional[List[str]]"),
    ("transformer", {"init_method": "normal"}, "must be Optional[Callable], not 'normal'"),
    ("transformer", {"hidden_size": 64}, "it comes from model.path's config.json"),
    ("transformer", {"tensor_model_parallel_size": 2}, "set it in trainer.parallel"),
    ("transformer", {"bf16": True}, "set it in trainer.precision"),
    ("transformer", {"attention_dropout": 0.1}, "log-probs have to equal the engine's"),
    ("transformer", {"recompute_granularity": "full"}, "recompute_method: set it"),
    ("transformer", {"recompute_granularity": "full", "recompute_method": "block"}, "recompute_num_layers: set it"),
    ("transformer", {"recompute_method": "block"}, "only with recompute_granularity: full"),
    (
        "transformer",
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        "needs the grouped GEMM",
    ),
    ("transformer", {"apply_rope_fusion": True}, "needs a GPU"),
    ("transformer", {"overlap_p2p_comm": True}, "works only with trainer.parallel.virtual_pipeline"),
    # Trap 7: refused on dense models too, because variable_seq_lengths is on.
    ("transformer", {"moe_token_dispatcher_type": "allgather"}, "cannot handle packed micro-batches"),
    ("transformer", {"variable_seq_lengths": False}, "megarl needs it true"),
    # Trap 10: mean of micro-batch means.
    ("transformer", {"calculate_per_token_loss": False}, "a mean of micro-batch means is wrong"),
    ("ddp", {"average_in_collective": True}, "divided by global token counts"),
    ("optimizer", {"lr": 1.0}, "set it in trainer.optimizer"),
    ("optimizer", {"optimizer": "sgd"}, "use adam"),
    ("optimizer", {"main_grads_dtype": "fp32"}, "cannot be given in YAML"),
    # Trap 5: what dist checkpointing could not save in a form that another layout loads.
    ("ddp", {"num_distributed_optimizer_instances": 2}, "cannot be saved"),
    ("ddp", {"overlap_param_gather": True, "overlap_grad_reduce": False}, "needs overlap_grad_reduce"),
    ("transformer", {"gradient_accumulation_fusion": True}, "modules fuse weight gradients without it"),
    ("ddp", {"bucket_size": 1.5}, "must be Optional[int]"),
]


@pytest.mark.parametrize(("target", "fields", "reported"), MEGATRON, ids=lambda value: str(value)[:60])
def test_passed_megatron_fields(models: Models, target: str, fields: dict[str, Any], reported: str) -> None:
    found = problems(models["qwen3"], **{f"megatron__{target}": fields})
    assert any(reported in problem for problem in found)
    assert all(problem.startswith(f"megatron.{target}.") for problem in found)


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        ({}, 4),
        ({"pipeline": 2}, 2),
        ({"pipeline": 2, "virtual_pipeline": 2}, 1),
        ({"pipeline": 2, "last_stage_layers": 1}, 3),
        ({"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "E|tt|t|tL"}, 2),
    ],
)
def test_no_more_layers_are_recomputed_than_a_stage_has(models: Models, layout: dict[str, Any], most: int) -> None:
    changes: dict[str, Any] = {"trainer__gpus": layout.get("pipeline", 1), "trainer__parallel": layout}
    assert problems(models["qwen3"], **changes, trainer__recompute=most) == []
    (found,) = problems(models["qwen3"], **changes, trainer__recompute=most + 1)
    assert found.startswith(f"trainer.recompute: {most + 1} layers") and found.endswith(f"use 1 to {most}")
    fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": most + 1}
    (found,) = problems(models["qwen3"], **changes, megatron__transformer=fields)
    assert found.startswith("megatron.transformer.recompute_num_layers:") and found.endswith(f"use 1 to {most}")


@pytest.mark.parametrize("field", [{"overlap_p2p_comm": False}, {"batch_p2p_comm": True}])
def test_interleaved_pipeline_needs_overlap(models: Models, field: dict[str, bool]) -> None:
    """Without the overlap gradients are silently wrong with PP = 2."""
    layout = {"pipeline": 2, "virtual_pipeline": 2}
    changes: dict[str, Any] = {"trainer__gpus": 2, "trainer__parallel": layout}
    assert problems(models["qwen3"], **changes) == []
    found = problems(models["qwen3"], **changes, megatron__transformer=field)
    assert len(found) == 1 and "gradients are wrong without an error" in found[0]


def test_replay_of_experts_passes(models: Models) -> None:
    assert problems(models["qwen3_moe"], **R2) == problems(models["qwen3_moe"], **R3) == []


def test_useful_megatron_fields_pass(models: Models) -> None:
    transformer = {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "moe_router_dtype": "fp64",
        "moe_token_dispatcher_type": "alltoall",
    }
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000}
    assert problems(models["qwen3_moe"], megatron__transformer=transformer, megatron__ddp=ddp) == []


def test_gpu_only_fields_pass_on_gpus(models: Models) -> None:
    fields = {"apply_rope_fusion": True, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    assert problems(models["qwen3"], device="cuda", megatron__transformer=fields) == []
