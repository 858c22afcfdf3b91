"""Config to vLLM's arguments: what each device path needs, and what the user cannot undo."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import vllm.envs
from vllm.config.compilation import PassConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from megarl.common.process import no_torchvision
from megarl.config.checks.engine import CPU_HEAD_SIZES, engine_problems
from megarl.config.schema import RolloutConfig
from megarl.rollout.engine.engine_args import _whole_prompts, engine_args, engine_environment
from tests.support.engines.live_engine import LiveReplica
from tests.support.models.quantized import quantized_model
from tests.support.models.tiny import make_tiny_model
from tests.support.pool.pool import pool_config


def config(tmp_path: Path, **sections: dict):
    return pool_config(tmp_path, tmp_path / "no_model_needed", **sections)


def test_on_cpu_one_process_runs_the_model_eagerly(tmp_path: Path) -> None:
    args = engine_args(config(tmp_path), cuda=False, max_model_len=80)
    assert args["distributed_executor_backend"] == "uni" and args["enforce_eager"] is True
    assert args["dtype"] == "float32" and args["logprobs_mode"] == "processed_logprobs" and args["max_model_len"] == 80
    assert args["attention_config"] == {"backend": "CPU_MLA"}  # AMX's kernel of latent attention has no fp32
    assert "attention_config" not in engine_args(config(tmp_path, trainer={"precision": "bf16"}), cuda=False)
    environment = engine_environment(config(tmp_path).rollout, cuda=False)
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "VLLM_CPU_OMP_THREADS_BIND" not in environment


def test_the_sizes_of_heads_on_cpu_are_those_of_vllm() -> None:
    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()


def test_tensor_parallel_engines_get_workers_and_cores(tmp_path: Path) -> None:
    two = config(tmp_path, rollout={"tensor_parallel": 2})
    assert engine_args(two, cuda=False)["distributed_executor_backend"] == "mp"
    environment = engine_environment(two.rollout, cuda=False)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1" and environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment


def test_on_gpu_nothing_of_the_cpu_path_remains(tmp_path: Path) -> None:
    gpu = config(tmp_path, trainer={"precision": "bf16"})
    args = engine_args(gpu, cuda=True)
    assert args["distributed_executor_backend"] is None and args["enforce_eager"] is False
    assert args["dtype"] == "bfloat16" and "attention_config" not in args
    assert not any("CPU" in name or "DYNAMO" in name for name in engine_environment(gpu.rollout, cuda=True))


def test_models_with_states_have_no_prefix_cache_on_a_cpu(tmp_path: Path) -> None:
    plain, hybrid = (
        pool_config(tmp_path, make_tiny_model(tmp_path / family, family)) for family in ("qwen3", "qwen3_5")
    )
    cached = [
        engine_args(each, cuda=cuda)["enable_prefix_caching"] for each in (plain, hybrid) for cuda in (False, True)
    ]
    assert cached == [True, True, False, True]
    assert no_torchvision.DELTA_NET in engine_environment(hybrid.rollout, cuda=False, model=hybrid.model.path)
    assert no_torchvision.DELTA_NET not in engine_environment(plain.rollout, cuda=False, model=plain.model.path)


def test_the_text_model_inside_of_one_that_sees_is_served(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3_5")
    text = json.loads((model / "config.json").read_text())
    sees = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 1}}
    (model / "config.json").write_text(json.dumps(sees))
    arguments = engine_args(pool_config(tmp_path, model), cuda=False)
    assert arguments["hf_overrides"] == {"architectures": ["Qwen3_5ForCausalLM"]}
    assert arguments["skip_tokenizer_init"] is True and "limit_mm_per_prompt" not in arguments


@pytest.mark.parametrize(("mode", "policy"), [("sync", None), ("async", "priority")])
def test_engines_schedule_by_priority_if_evaluations_run_alongside_training(
    tmp_path: Path, mode: str, policy: str | None
) -> None:
    chosen = config(tmp_path, admission={"mode": mode})
    assert engine_args(chosen, cuda=False).get("scheduling_policy") == policy


@pytest.mark.parametrize("cuda", [False, True])
def test_engines_read_no_weights_that_the_first_sync_replaces(tmp_path: Path, cuda: bool) -> None:
    assert RolloutConfig().load_weights is False
    training = config(tmp_path, rollout={"load_weights": False})
    assert engine_args(training, cuda=cuda)["load_format"] == "dummy"
    assert "load_format" not in engine_args(config(tmp_path, rollout={"load_weights": True}), cuda=cuda)


@pytest.mark.parametrize("cuda", [False, True])
def test_engines_of_a_quantised_model_are_plain_and_wait_for_the_first_sync(tmp_path: Path, cuda: bool) -> None:
    quantised, _ = quantized_model(tmp_path, "qwen3_moe", "fp8")
    passed = {"load_weights": True, "engine_kwargs": {"hf_overrides": {"rope_theta": 1e4}}}
    args = engine_args(pool_config(tmp_path, quantised, rollout=passed), cuda=cuda)
    assert args["load_format"] == "dummy"
    assert args["hf_overrides"] == {"rope_theta": 1e4, "quantization_config": None}


@pytest.mark.parametrize(("ranks", "kernels", "off"), [(1, False, False), (2, True, False), (2, False, True)])
def test_engines_never_download_kernels_for_the_fused_all_reduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, kernels: bool, off: bool
) -> None:
    found = importlib.util.find_spec
    monkeypatch.delenv("VLLM_HAS_FLASHINFER_CUBIN", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: kernels or None if n == "flashinfer_cubin" else found(n))
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_FLASHINFER", raising=False)
    engine = config(tmp_path, rollout={"tensor_parallel": ranks})
    assert engine_environment(engine.rollout, cuda=True).get("VLLM_ALLREDUCE_USE_FLASHINFER") == ("0" if off else None)
    assert "VLLM_ALLREDUCE_USE_FLASHINFER" in vllm.envs.environment_variables
    args = engine_args(engine, cuda=True)
    assert args.get("compilation_config") == ({"pass_config": {"fuse_allreduce_rms": False}} if off else None)
    assert "fuse_allreduce_rms" in {field.name for field in dataclasses.fields(PassConfig)}
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")
    assert engine_environment(engine.rollout, cuda=True).get("VLLM_ALLREDUCE_USE_FLASHINFER") in (None, "1")
    monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
    assert "compilation_config" not in engine_args(engine, cuda=True)
    passed = {"tensor_parallel": ranks, "engine_kwargs": {"compilation_config": {"level": 0}}}
    assert engine_args(config(tmp_path, rollout=passed), cuda=True)["compilation_config"] == {"level": 0}


def test_engine_kwargs_cannot_undo_what_training_relies_on(tmp_path: Path) -> None:
    passed = config(tmp_path, rollout={"engine_kwargs": {"block_size": 32, "enforce_eager": True}})
    assert engine_args(passed, cuda=False)["block_size"] == 32
    assert engine_args(passed, cuda=True)["enforce_eager"] is True
    broken = config(tmp_path, rollout={"engine_kwargs": {"logprobs_mode": "raw_logprobs"}})
    with pytest.raises(ValueError, match=r"rollout\.engine_kwargs\.logprobs_mode.*temperature"):
        engine_args(broken, cuda=False)


@pytest.mark.parametrize("cuda", [False, True])
def test_the_plan_refuses_what_the_replica_refuses(tmp_path: Path, cuda: bool) -> None:
    """These are the arguments that megarl passes itself, without those that only have a better default there."""
    defaults = {"disable_log_stats", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens"}
    defaults |= {"enforce_eager", "attention_config"}
    for name in set(engine_args(config(tmp_path), cuda=cuda, max_model_len=80)) - defaults | {"weight_transfer_config"}:
        broken = config(tmp_path, rollout={"engine_kwargs": {name: None}})
        (problem,) = engine_problems(broken.rollout)
        assert problem.startswith(f"rollout.engine_kwargs.{name}: ")
        with pytest.raises(ValueError, match=rf"rollout\.engine_kwargs\.{name}: reserved"):
            engine_args(broken, cuda=cuda)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False])
def test_a_seeded_prompt_longer_than_one_step(tmp_path: Path, cut: bool) -> None:
    """A prompt that is cut over two steps kills vLLM 0.32 on CPU, which is why `engine_args` keeps prompts whole."""
    batched = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64} if cut else _whole_prompts(512)
    replica = LiveReplica(make_tiny_model(tmp_path / "model"), **batched)
    response = replica.generate(list(range(3, 83)) * 3, "long", max_tokens=4, seed=5)
    try:
        if cut:
            with pytest.raises(Exception, match=r"EngineCore|EngineDead"):
                response.result(120)
        else:
            assert len(response.result(120).ids) == 4
    finally:
        replica.shutdown()
