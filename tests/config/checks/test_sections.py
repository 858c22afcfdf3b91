"""Each check refuses what it must, names the key and the fix, and lets its neighbour pass."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.checks.sections import check
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import config

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


def test_evaluation_may_sample_from_a_part_of_the_distribution(models: Models, data: Path) -> None:
    sets = [{"name": "held", "path": str(data)}]
    sampling = {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
    assert problems(models["qwen3"], data, evaluation={"sets": sets, "sampling": sampling}) == []


OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "admission": {"mode": "async", "sync_interval": 1, "max_staleness": 3, "max_uses": 2},
            "monitor__rules__ess": {"action": "skip"},
        },
        "monitor.rules.ess.action: a step that trains groups again (admission.max_uses=2) cannot be skipped",
    ),
    ({"trainer__mini_batches": 5}, "trainer.mini_batches: 5 updates from 4 groups"),
    (
        {"admission__refill": True, "algorithm__filter_zero_variance": False},
        "admission.refill: it replaces the groups that algorithm.filter_zero_variance drops",
    ),
    ({"trainer__optimizer": {"lr": 1e-6, "min_lr": 1e-5}}, "trainer.optimizer.min_lr: above lr"),
    (
        {"trainer__optimizer": {"warmup_steps": 4}},
        "trainer.optimizer.warmup_steps: 4 must be below the 4 updates of the",
    ),
    (
        {"trainer__optimizer": {"warmup_steps": 8}, "trainer__mini_batches": 2},
        "trainer.optimizer.warmup_steps: 8 must be below the 8 updates of the run (run.steps * trainer.mini_batches)",
    ),
    ({"trainer__optimizer": {"betas": [0.9, 1.0]}}, "trainer.optimizer.betas.1: must be in [0, 1)"),
    ({"algorithm__loss_options__clip_low": 1.0}, "algorithm.loss_options.clip_low"),
    (
        {"algorithm__correction": {"kind": "icepop", "cap": 3.0}},
        "algorithm.correction.cap: 3.0 has no effect with kind: icepop",
    ),
    ({"algorithm__overlong": {"buffer_tokens": 33}}, "algorithm.overlong.buffer_tokens: 33 is more than"),
    ({"rollout__group_deadline_s": 1800}, "rollout.group_deadline_s: 1800 s would never come"),
    (
        {"rollout": {"group_deadline_s": 30, "on_group_deadline": "finish"}},
        "rollout.group_deadline_s: 30 s would never",
    ),
    ({"sampling__stop_token_ids": []}, "sampling.stop_token_ids: empty"),
    (
        {"gateway__enabled": True, "run__deterministic": True},
        "gateway.enabled: requests from outside change what an engine",
    ),
    ({"gateway__host": "0.0.0.0"}, "gateway.host: '0.0.0.0' means all addresses"),
    (
        {"checkpoint__keep_best": "eval/a/greedy"},
        "checkpoint.keep_best: 'eval/a/greedy' is no metric of an evaluation set",
    ),
    ({"evaluation__every": 2}, "evaluation.every: set, but evaluation.sets is empty"),
    ({"evaluation__concurrent": True, "run__deterministic": True}, "evaluation.concurrent: run.deterministic needs"),
    ({"reward__function": "no_such_module_x:f"}, "reward.function: no module 'no_such_module_x'"),
    ({"reward__function": "gsm9k"}, "neither code, gsm8k, math nor an import path"),
    ({"weight_sync__transport": "nccl"}, "weight_sync.transport: nccl needs GPUs"),
    (
        {"rollout__engine_kwargs": {"dtype": "half"}},
        "rollout.engine_kwargs.dtype: reserved; set trainer.precision",
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
        "trainer.micro_batch_tokens: 32 leaves no room for a prompt alongside responses of 32 tokens",
    ),
    (
        {"data__max_prompt_tokens": None, "agent__loop": "json:Loop"},
        "trainer.micro_batch_tokens: 256 is less than the longest sample (512 tokens); a sample is never split, so "
        "raise it to at least 512, or set rollout.max_model_len, which bounds a trajectory of json:Loop",
    ),
    ({"data__path": "nowhere.jsonl"}, "data.path: no such file: nowhere.jsonl (current directory:"),
    ({"model__path": "nowhere"}, "model.path: no such directory: nowhere"),
    ({"algorithm__kl": {"coef": 0.1}, "reference__path": "nowhere"}, "reference.path: no such directory"),
    ({"evaluation": {"sets": [{"name": "a", "path": "nowhere.jsonl"}]}}, "evaluation.sets.0.path: no such file"),
]


@pytest.mark.parametrize(("changes", "message"), OTHERS, ids=lambda value: str(value)[:60])
def test_what_does_not_fit_together(models: Models, data: Path, changes: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in problems(models["qwen3"], data, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__max_model_len": 256},
        {"trainer__micro_batch_tokens": 512},
        {"trainer__micro_batch_tokens": "auto"},
        {"agent__loop": "tool_agent", "tools": [{"kind": "json:calculator"}]},
    ],
)
def test_the_trajectories_of_any_loop_fit_a_micro_batch(models: Models, data: Path, changes: dict[str, Any]) -> None:
    own = {"data__max_prompt_tokens": None, "agent__loop": "json:Loop"}
    assert problems(models["qwen3"], data, **own | changes) == []


def test_evaluation_set_names(models: Models, data: Path) -> None:
    sets = [{"name": name, "path": str(data)} for name in ("a", "a", "b/c")]
    found = problems(models["qwen3"], data, evaluation={"sets": sets})
    assert len(found) == 2 and "given twice" in found[0] and "without '/'" in found[1]


@pytest.mark.parametrize(
    ("metric", "every", "message"),
    [
        ("eval/a/greedy", 2, None),
        ("eval/b/greedy", 2, "'eval/b/greedy' is no metric of an evaluation set; try eval/a/greedy"),
        ("eval/a/greedy", 0, "needs evaluations during the run; set evaluation.every"),
    ],
)
def test_the_best_checkpoint_is_chosen_by_an_evaluation_that_is_made(
    models: Models, data: Path, metric: str, every: int, message: str | None
) -> None:
    evaluation = {"sets": [{"name": "a", "path": str(data)}], "every": every}
    found = problems(models["qwen3"], data, checkpoint__keep_best=metric, evaluation=evaluation)
    assert found == ([] if message is None else [f"checkpoint.keep_best: {message}"])


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


def test_a_name_of_the_hub_gets_the_command_that_fetches_it(data: Path) -> None:
    found = " ".join(problems(Path("Qwen/Qwen3-0.6B"), data))
    assert "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`" in found
    assert "hf download" not in " ".join(problems(Path("/nowhere/model"), data))


def test_a_tokenizer_that_is_code_is_never_run(models: Models, data: Path, tmp_path: Path) -> None:
    shutil.copytree(models["qwen3"], tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    settings = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    found = problems(tmp_path / "model", data)
    assert any("Python code of the model (auto_map), which is never run" in each for each in found)
    for name in ("vocab.json", "merges.txt"):  # which transformers loads
        (tmp_path / "model" / name).write_text("")
    assert not problems(tmp_path / "model", data)


def test_a_path_may_begin_with_the_users_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config("~/model", "data.jsonl", run__dir="~/runs/a").run_dir == tmp_path / "runs" / "a"


def test_every_problem_is_listed_once(models: Models, data: Path) -> None:
    found = problems(models["qwen3"], data, sampling__stop_token_ids=[], trainer__mini_batches=9, trainer__gpus=3,
                     trainer__parallel={"tensor": 2})  # fmt: skip
    assert len(found) == len(set(found)) >= 3


def test_a_model_without_the_keys_that_vllm_needs_is_refused(tmp_path: Path, data: Path) -> None:
    model = make_tiny_model(tmp_path / "model", family="deepseek_v3", scoring_func=None)
    [problem] = problems(model, data)
    assert problem.startswith("model.path: ") and problem.count("scoring_func") == 2 and '"sigmoid"' in problem


def test_states_of_old_weights_are_refused(models: dict[str, Path], data: Path) -> None:
    kept = {"weight_sync__recompute_kv": False}
    [problem] = problems(models["qwen3_5"], data, **kept)
    assert problem.startswith("weight_sync.recompute_kv: ") and problem.endswith("set it to true")
    assert problems(models["qwen3"], data, **kept) == [] == problems(models["qwen3_5"], data)


def test_delta_net_has_no_context_parallelism(models: dict[str, Path], data: Path) -> None:
    shared = {"trainer__gpus": 2, "trainer__parallel": {"context": 2}}
    [problem] = problems(models["qwen3_5"], data, **shared)
    assert problem.startswith("trainer.parallel.context: the states of Gated DeltaNet layers need whole sequences")


def test_delta_net_heads_are_whole_on_each_rank(models: dict[str, Path], data: Path) -> None:
    wide = {"trainer__gpus": 8, "trainer__parallel": {"tensor": 8}}
    assert any(
        "4 DeltaNet key heads cannot be split 8 ways" in each for each in problems(models["qwen3_5"], data, **wide)
    )


def test_heads_that_vllm_cannot_attend_with_are_refused_where_its_cpu_backend_is_used(
    tmp_path: Path, data: Path
) -> None:
    model = make_tiny_model(tmp_path / "small", head_dim=16)
    [problem] = problems(model, data)
    assert problem.startswith("model.path: its attention heads have 16 channels (head_dim)") and " 32, 64" in problem
    assert problems(model, data, device="cuda") == []
    latent = make_tiny_model(tmp_path / "latent", family="deepseek_v3")
    assert not any("head_dim" in each for each in problems(latent, data))
