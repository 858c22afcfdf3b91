"""Each check refuses what it must, names the key and the fix, and lets its neighbour pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.checks import check
from tests.support.configs import config

Models = dict[str, Path]


def problems(model: Path, data: Path, *, device: Any = "cpu", **changes: Any) -> list[str]:
    try:
        check(config(model, data, **changes), device=device)
    except ConfigError as error:
        return error.problems
    return []


def test_a_good_config_passes(models: Models, data: Path) -> None:
    info = check(config(models["qwen3"], data), device="cpu")
    assert (info.family, info.num_layers) == ("qwen3", 4)
    assert problems(models["qwen3_moe"], data, trainer__gpus=4, trainer__parallel={"expert": 2}) == []


LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"trainer__gpus": 3, "trainer__parallel": {"tensor": 2}}, "trainer.gpus: 3 is not a multiple"),
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
    ("qwen3", {"trainer__gpus": 3, "trainer__parallel": {"pipeline": 3}}, "4 layers cannot be split into 3 equal"),
    (
        "qwen3",
        {"trainer__gpus": 2, "trainer__parallel": {"pipeline": 2, "virtual_pipeline": 4}},
        "4 layers cannot be split into 8 equal",
    ),
    ("qwen3", {"trainer__gpus": 2, "trainer__parallel": {"expert": 2}}, "this model has no experts"),
    ("qwen3_moe", {"trainer__gpus": 3, "trainer__parallel": {"expert": 3}}, "4 experts cannot be split 3 ways"),
    # Trap 8 of megatron-core 0.16.1.
    ("qwen3_moe", {"trainer__gpus": 2, "trainer__parallel": {"tensor": 2}}, "only with sequence parallelism"),
    # Trap 2: experts diverge silently.
    (
        "qwen3_moe",
        {"trainer__gpus": 2, "trainer__parallel": {"tensor": 2, "sequence": True, "expert_tensor": 1}},
        "diverge without an error",
    ),
    (
        "qwen3_moe",
        {"trainer__gpus": 4, "trainer__parallel": {"tensor": 2, "sequence": True, "expert": 2}},
        "uneven all-gather",
    ),
]


@pytest.mark.parametrize(("family", "changes", "told"), LAYOUTS, ids=lambda value: str(value)[:60])
def test_impossible_layouts(models: Models, data: Path, family: str, changes: dict[str, Any], told: str) -> None:
    assert any(told in problem for problem in problems(models[family], data, **changes))


def test_key_value_heads_may_be_fewer_than_ranks(models: Models, data: Path) -> None:
    assert problems(models["qwen3"], data, trainer__gpus=4, trainer__parallel={"tensor": 4}) == []


MEGATRON: list[tuple[str, dict[str, Any], str]] = [
    ("transformer", {"recompute_granulariti": "full"}, "has no such field; did you mean recompute_granularity"),
    ("transformer", {"recompute_granularity": "fully"}, "must be Optional[Literal['full', 'selective']], not 'fully'"),
    ("transformer", {"recompute_num_layers": "1"}, "must be Optional[int]"),
    ("transformer", {"recompute_num_layers": True}, "must be Optional[int]"),
    ("transformer", {"moe_aux_loss_coeff": "a"}, "must be Union[float, List[float]]"),
    ("transformer", {"recompute_modules": "mlp"}, "must be Optional[List[str]]"),
    ("transformer", {"init_method": "normal"}, "cannot be given in YAML"),
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
    ("transformer", {"gradient_accumulation_fusion": True}, "set trainer.fused_weight_gradients"),
    ("ddp", {"bucket_size": 1.5}, "must be Optional[int]"),
]


@pytest.mark.parametrize(("target", "fields", "told"), MEGATRON, ids=lambda value: str(value)[:60])
def test_passed_megatron_fields(models: Models, data: Path, target: str, fields: dict[str, Any], told: str) -> None:
    found = problems(models["qwen3"], data, **{f"megatron__{target}": fields})
    assert any(told in problem for problem in found)
    assert all(problem.startswith(f"megatron.{target}.") for problem in found)


@pytest.mark.parametrize(
    ("layout", "most"), [({}, 4), ({"pipeline": 2}, 2), ({"pipeline": 2, "virtual_pipeline": 2}, 1)]
)
def test_no_more_layers_are_recomputed_than_a_stage_has(
    models: Models, data: Path, layout: dict[str, int], most: int
) -> None:
    changes: dict[str, Any] = {"trainer__gpus": layout.get("pipeline", 1), "trainer__parallel": layout}
    assert problems(models["qwen3"], data, **changes, trainer__recompute=most) == []
    (found,) = problems(models["qwen3"], data, **changes, trainer__recompute=most + 1)
    assert found.startswith(f"trainer.recompute: {most + 1} layers") and found.endswith(f"use 1 to {most}")
    fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": most + 1}
    (found,) = problems(models["qwen3"], data, **changes, megatron__transformer=fields)
    assert found.startswith("megatron.transformer.recompute_num_layers:") and found.endswith(f"use 1 to {most}")


@pytest.mark.parametrize("field", [{"overlap_p2p_comm": False}, {"batch_p2p_comm": True}])
def test_interleaved_pipeline_needs_overlap(models: Models, data: Path, field: dict[str, bool]) -> None:
    """Without the overlap gradients are silently wrong with PP = 2."""
    layout = {"pipeline": 2, "virtual_pipeline": 2}
    changes: dict[str, Any] = {"trainer__gpus": 2, "trainer__parallel": layout}
    assert problems(models["qwen3"], data, **changes) == []
    found = problems(models["qwen3"], data, **changes, megatron__transformer=field)
    assert len(found) == 1 and "gradients are wrong without an error" in found[0]


def test_useful_megatron_fields_pass(models: Models, data: Path) -> None:
    transformer = {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "moe_router_dtype": "fp64",
        "moe_token_dispatcher_type": "alltoall",
    }
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000}
    assert problems(models["qwen3_moe"], data, megatron__transformer=transformer, megatron__ddp=ddp) == []


def test_gpu_only_fields_pass_on_gpus(models: Models, data: Path) -> None:
    fields = {"apply_rope_fusion": True, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    assert problems(models["qwen3"], data, device="cuda", megatron__transformer=fields) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1), ("repetition_penalty", 1.1), ("presence_penalty", 0.5),
     ("frequency_penalty", 0.5)],
)  # fmt: skip
def test_training_samples_from_the_whole_distribution(models: Models, data: Path, name: str, value: float) -> None:
    found = problems(models["qwen3"], data, **{f"sampling__{name}": value})
    assert len(found) == 1
    assert found[0].startswith(f"sampling.{name}: must be") and "importance ratio" in found[0]


def test_evaluation_may_use_them(models: Models, data: Path) -> None:
    sets = [{"name": "held", "path": str(data)}]
    sampling = {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
    assert problems(models["qwen3"], data, evaluation={"sets": sets, "sampling": sampling}) == []


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"trainer__mini_batches": 5}, "trainer.mini_batches: 5 updates from 4 groups"),
    ({"queue__capacity": 15}, "queue.capacity: 15 samples hold 3 groups of 4, but a step takes batch.groups=4 at once"),
    (
        {"admission__refill": True, "algorithm__filter_zero_variance": False},
        "admission.refill: it replaces the groups that algorithm.filter_zero_variance drops",
    ),
    ({"trainer__optimizer": {"lr": 1e-6, "min_lr": 1e-5}}, "trainer.optimizer.min_lr: above lr"),
    ({"trainer__optimizer": {"warmup_steps": 4}}, "trainer.optimizer.warmup_steps: 4 must be below run.steps=4"),
    ({"trainer__optimizer": {"betas": [0.9, 1.0]}}, "trainer.optimizer.betas.1: must be in [0, 1)"),
    ({"algorithm__clip_low": 1.0}, "algorithm.clip_low"),
    ({"algorithm__overlong": {"buffer_tokens": 33}}, "algorithm.overlong.buffer_tokens: 33 is more than"),
    ({"rollout__group_deadline_s": 1800}, "rollout.group_deadline_s: 1800 s would never come"),
    ({"sampling__stop_token_ids": []}, "sampling.stop_token_ids: empty"),
    ({"evaluation__every": 2}, "evaluation.every: set, but evaluation.sets is empty"),
    ({"evaluation__concurrent": True, "run__deterministic": True}, "evaluation.concurrent: run.deterministic needs"),
    ({"evaluation__pin": 1, "evaluation__concurrent": True}, "evaluation.pin: 1 of rollout.replicas=1 leaves none"),
    ({"evaluation__pin": 1, "rollout__replicas": 2}, "evaluation.pin: evaluations here use all replicas between two"),
    (
        {"evaluation__pin": 1, "rollout__replicas": 2, "admission__mode": "async", "run__deterministic": True},
        "evaluation.pin: run.deterministic needs the same engine steps",
    ),
    (
        {
            "evaluation__pin": 1,
            "rollout__replicas": 2,
            "admission__mode": "async",
            "weight_sync__recompute_kv": False,
        },
        "evaluation.pin: weight_sync.recompute_kv is false",
    ),
    ({"reward__function": "no_such_module_x:f"}, "reward.function: no module 'no_such_module_x'"),
    ({"reward__function": "gsm9k"}, "neither gsm8k, math nor an import path"),
    ({"weight_sync__transport": "nccl"}, "weight_sync.transport: nccl needs GPUs"),
    (
        {"weight_sync__staging_gib": 0.75, "weight_sync__bucket_mb": 512},
        "weight_sync.staging_gib: 0.75 GiB hold fewer than 3 buckets of 512 MiB (weight_sync.bucket_mb), and 2 are "
        "used without it; raise it to at least 1.5",
    ),
    (
        {"rollout__engine_kwargs": {"dtype": "half"}},
        "rollout.engine_kwargs.dtype: reserved; set rollout.dtype",
    ),
    (
        {"rollout__engine_kwargs": {"skip_tokenizer_init": False}},
        "skip_tokenizer_init: reserved; always true",
    ),
    ({"rollout__engine_kwargs": {"block_sise": 16}}, "did you mean block_size"),
    ({"rollout__max_model_len": 4096}, "rollout.max_model_len: 4096 is more than the model's 512 positions"),
    ({"sampling__max_tokens": 512}, "sampling.max_tokens: responses of 512 tokens leave no room"),
    (
        {"evaluation__max_tokens": 512, "evaluation__sets": [{"name": "a", "path": "held.jsonl"}]},
        "evaluation.max_tokens: responses of 512 tokens leave no room",
    ),
    (
        {"evaluation__max_tokens": 4, "evaluation__sets": [{"name": "a", "path": "held.jsonl", "max_tokens": 512}]},
        "evaluation.sets.0.max_tokens: responses of 512 tokens leave no room",
    ),
    ({"data__max_prompt_tokens": 500}, "data.max_prompt_tokens: 500 + 32 response tokens exceed"),
    ({"trainer__micro_batch_tokens": 63}, "trainer.micro_batch_tokens: 63 is less than the longest sample (64"),
    (
        {"data__max_prompt_tokens": None, "trainer__micro_batch_tokens": 32},
        "trainer.micro_batch_tokens: 32 leaves no room for a prompt beside responses of 32 tokens",
    ),
    ({"data__path": "nowhere.jsonl"}, "data.path: no such file: nowhere.jsonl (current directory:"),
    ({"model__path": "nowhere"}, "model.path: no such directory: nowhere"),
    ({"algorithm__kl": {"coef": 0.1}, "reference__path": "nowhere"}, "reference.path: no such directory"),
    ({"evaluation": {"sets": [{"name": "a", "path": "nowhere.jsonl"}]}}, "evaluation.sets.0.path: no such file"),
]


@pytest.mark.parametrize(("changes", "told"), OTHERS, ids=lambda value: str(value)[:60])
def test_what_does_not_fit_together(models: Models, data: Path, changes: dict[str, Any], told: str) -> None:
    assert any(told in problem for problem in problems(models["qwen3"], data, **changes))


def test_evaluation_set_names(models: Models, data: Path) -> None:
    sets = [{"name": name, "path": str(data)} for name in ("a", "a", "b/c")]
    found = problems(models["qwen3"], data, evaluation={"sets": sets})
    assert len(found) == 2 and "given twice" in found[0] and "without '/'" in found[1]


def test_files_can_be_left_out(models: Models) -> None:
    elsewhere = config(models["qwen3"], "/on/the/cluster/data.jsonl")
    with pytest.raises(ConfigError, match=r"data\.path"):
        check(elsewhere, device="cpu")
    check(elsewhere, device="cpu", files=False)


def test_model_without_weights_or_tokenizer(models: Models, data: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((models["qwen3"] / "config.json").read_text())
    found = problems(tmp_path, data)
    assert any("no *.safetensors" in problem for problem in found)
    assert any("no tokenizer.json" in problem for problem in found)


def test_unknown_architecture_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert any("GPT2LMHeadModel" in problem for problem in problems(tmp_path, data))


def test_every_problem_is_listed_once(models: Models, data: Path) -> None:
    found = problems(models["qwen3"], data, sampling__top_p=0.5, trainer__mini_batches=9, trainer__gpus=3,
                     trainer__parallel={"tensor": 2})  # fmt: skip
    assert len(found) == len(set(found)) >= 3
