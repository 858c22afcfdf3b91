"""vLLM's arguments and environment, derived from the config. Pure."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.common.process import no_torchvision
from megarl.common.process.memory_tuning import begin_start, end_start
from megarl.common.trust.secret_references import resolved
from megarl.config.checks.engine import RESERVED
from megarl.config.derived.staleness import evaluates_alongside_training
from megarl.config.schema import CPU_KV_CACHE_GIB, Config, RolloutConfig, VisionConfig
from megarl.models.hf.model_files import hf_files, not_for_engines, raw_config
from megarl.models.hf.read_config import family_of, sees


class EngineStart:
    """Wraps `EngineCoreProc.run_engine_core` (vllm 0.32.0) to collect garbage rarely during the engine's imports.

    multiprocessing pickles it before its arguments; unpickling these imports vLLM in the new process, for seconds.
    """

    def __init__(self, original: Callable[..., object]) -> None:
        """`original`: vLLM's function."""
        self._original = original

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Run the engine of this process with vLLM's own arguments."""
        end_start()
        self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], EngineStart], tuple[()]]:
        return _in_new_process, ()


def _in_new_process() -> EngineStart:
    begin_start()
    from vllm.v1.engine.core import EngineCoreProc

    return EngineStart(EngineCoreProc.run_engine_core)


def start_engines_fast() -> None:
    """Make engine processes started by this process begin with an `EngineStart`. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    core: Any = EngineCoreProc
    if not isinstance(core.run_engine_core, EngineStart):
        core.run_engine_core = EngineStart(core.run_engine_core)


CPU_BATCHED_TOKENS = 8192
# vLLM's CPU worker ignores sleep. A name, because only the engine's process imports it.
SLEEPING_CPU_WORKER = "megarl.weights.receive.sleeping_worker.SleepingCPUWorker"
# An engine without a GPU returns experts after a call of `return_routed_experts` in its workers.
RETURNS_EXPERTS = {
    "scheduler_cls": "megarl.rollout.engine.routed_experts.ExpertsScheduler",
    "worker_extension_cls": "megarl.rollout.engine.routed_experts.ReturnsRoutedExperts",
}
GPU_MEMORY = "megarl.weights.receive.vllm_plugin.GpuMemory"


_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def engine_args(config: Config, *, cuda: bool, max_model_len: int | None = None) -> dict[str, Any]:
    """Return the keyword arguments of AsyncEngineArgs.

    Raises ValueError if `rollout.engine_kwargs` names an argument that megarl sets.
    """
    rollout = config.rollout
    for key in rollout.engine_kwargs:
        if key in RESERVED:
            raise ValueError(f"rollout.engine_kwargs.{key}: reserved; {RESERVED[key]}")
    # On CPU with one worker the engine process runs the model itself (see `engine_environment`).
    single = "uni" if not cuda else None
    arguments: dict[str, Any] = {
        "model": str(hf_files(config.model.path)),
        "tensor_parallel_size": rollout.tensor_parallel,
        "distributed_executor_backend": "mp" if rollout.tensor_parallel > 1 else single,
        "dtype": _DTYPES[config.trainer.precision],
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": not cuda,
        "max_model_len": rollout.max_model_len or max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "seed": config.run.seed,
    }
    raw = raw_config(config.model.path)
    if sees(raw):
        arguments |= _vision(config.model.vision, raw)
    elif raw.get("vision_config") and (family := family_of(raw)):
        arguments["hf_overrides"] = {"architectures": [family.architecture]}
    if not reads_weights(rollout, config.model.path):
        arguments["load_format"] = "dummy"
    if cuda and rollout.tensor_parallel > 1 and not _has_flashinfer_kernels():
        # On Hopper and Blackwell vLLM 0.32 (config/vllm.py:171) fuses all-reduce and norm with FlashInfer. Without
        # built kernels FlashInfer downloads and compiles them at the start: minutes, or an error without internet.
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if evaluates_alongside_training(config):
        arguments["scheduling_policy"] = "priority"
    if rollout.share_gpus:
        sleeps = {"enable_sleep_mode": True, "worker_extension_cls": GPU_MEMORY}
        arguments |= sleeps if cuda else {"worker_cls": SLEEPING_CPU_WORKER}
    if not cuda:
        arguments |= _whole_prompts(max_model_len or rollout.max_model_len)
        if has_states(raw):
            # With prefix caching vLLM keeps states at block boundaries, which needs chunked prefill.
            arguments["enable_prefix_caching"] = False
        if arguments["dtype"] == "float32":
            # With AMX vLLM picks a kernel for latent attention that supports only bf16, and dies in fp32. Models with
            # other attention ignore this.
            arguments["attention_config"] = {"backend": "CPU_MLA"}
    arguments |= resolved(rollout.engine_kwargs, "rollout.engine_kwargs")
    if raw.get("quantization_config"):  # the trainer sends plain weights
        arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), "quantization_config": None}
    return arguments


def has_states(raw: Mapping[str, Any]) -> bool:
    """Return whether a model has Gated DeltaNet layers, by its parsed config.json."""
    return "linear_num_value_heads" in (raw.get("text_config") or raw)


def _vision(vision: VisionConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a vision model. It gets finished patches, so its processor never runs.

    vLLM measures its memory with the largest image that the processor's bounds allow.
    """
    side = int(raw["vision_config"]["patch_size"]) * int(raw["vision_config"].get("spatial_merge_size", 2))
    return {
        "skip_tokenizer_init": False,  # its processor needs one
        "limit_mm_per_prompt": {"image": vision.images_per_prompt, "video": 0},
        "mm_processor_kwargs": {"size": {"shortest_edge": side**2, "longest_edge": max(vision.max_pixels, side**2)}},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,  # patches come normalised
    }


def _has_flashinfer_kernels() -> bool:
    """Return whether FlashInfer's kernels are installed, by vLLM's own rule (utils/flashinfer.py:77)."""
    declared = os.environ.get("VLLM_HAS_FLASHINFER_CUBIN", "0") not in ("0", "")
    return declared or importlib.util.find_spec("flashinfer_cubin") is not None


def reads_weights(rollout: RolloutConfig, model: Path) -> bool:
    """Return whether engines read the model's weights at the start; otherwise the first weight sync brings them.

    vLLM cannot read a Megatron checkpoint, and would run quantized weights in other arithmetic.
    """
    return rollout.load_weights and not not_for_engines(model)


def _whole_prompts(max_model_len: int | None) -> dict[str, Any]:
    """Return arguments that keep each prompt within one engine step. CPU only.

    A seeded request whose prompt spans two steps kills the engine: until the prompt is fully read, vLLM 0.32 undoes the
    request's draws with `Generator.set_offset`, which CPU generators lack (gpu_model_runner.py, `_bookkeeping_sync`).
    """
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_model_len or 0, CPU_BATCHED_TOKENS)}


def engine_environment(rollout: RolloutConfig, *, cuda: bool, model: Path | None = None) -> dict[str, str]:
    """Return the environment of the processes of an engine of `model`, to be set before vLLM is imported."""
    raw = raw_config(model) if model else {}
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({no_torchvision.VARIABLE: "1"} if sees(raw) else {}),
        **({no_torchvision.DELTA_NET: "1"} if has_states(raw) else {}),
    }
    if cuda:
        # vLLM also uses FlashInfer's all-reduce here, which compiles at the first call
        # (distributed/device_communicators/cuda_communicator.py:70).
        if rollout.tensor_parallel > 1 and not _has_flashinfer_kernels():
            environment["VLLM_ALLREDUCE_USE_FLASHINFER"] = os.environ.get("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
        return environment
    threads = rollout.tensor_parallel
    environment |= {
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB),
        "OMP_NUM_THREADS": "1",
        # Compiling the sampler's helpers takes 25 s at the first token and saves nothing on models of this size.
        "TORCHDYNAMO_DISABLE": "1",
    }
    if threads > 1:
        # One core per worker; by default vLLM requires one NUMA node per worker.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(threads))
    else:
        # vLLM refuses the "uni" executor on CPU unless this is set. The engine process then runs the model itself,
        # which saves the start of a worker process (15 s of CPU) and an RPC per token.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment
