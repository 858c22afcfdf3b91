"""Checks `rollout.engine_kwargs` against vLLM's fields, and a model against vLLM's attention on CPU."""

import difflib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from megarl.config.derived.algorithm import filters_equal_rewards
from megarl.config.derived.teachers import engine_teachers
from megarl.config.schema import AdmissionConfig, Config, RolloutConfig
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.families import FAMILIES

# Refuses what is impossible if engines and trainer take turns on the same GPUs (`rollout.share_gpus`).

# As in `megarl.platforms.platform`, which imports torch.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Fields of Megatron-Core with which the trainer's memory cannot be freed.
_PINNED = {
    "ddp": {"nccl_ub": "NCCL has registered that memory"},
    "transformer": dict.fromkeys(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        "a captured graph has the addresses of memory that is given back",
    ),
}


def shared_gpus_problems(config: Config, device: str) -> Iterator[str]:
    """Yield the problems of a config whose engines share the trainer's GPUs."""
    rollout, key = config.rollout, "rollout.share_gpus"
    if not rollout.share_gpus:
        if config.weight_sync.transport == "relay":
            yield "weight_sync.transport: relay is for engines on the trainer's GPUs (rollout.share_gpus); use auto"
        return
    yield from _needs_engines(config, key)
    if rollout.load_weights:
        yield f"{key}: sleeping engines lose weights that they read from files; set rollout.load_weights: false"
    if not config.weight_sync.recompute_kv:
        yield f"{key}: a sleep empties the KV cache; set weight_sync.recompute_kv: true"
    if rollout.max_replicas not in (None, rollout.replicas):
        yield f"{key}: engines start only while the trainer's memory is free; remove rollout.max_replicas"
    if rollout.devices is not None or rollout.gpus_per_node is not None or rollout.nodes == "separate":
        yield (
            f"{key}: the engines are on the trainer's GPUs (trainer.devices, trainer.gpus_per_node); remove "
            "rollout.devices, rollout.gpus_per_node and rollout.nodes"
        )
    yield from (
        f"rollout.engine_kwargs.{name}: with {key} megarl's own worker measures what an engine holds; remove it"
        for name in ("worker_cls", "worker_extension_cls")
        if name in rollout.engine_kwargs
    )
    if engine_teachers(config.teachers):
        yield (
            f"{key}: engines of teachers cannot sleep, because the trainer has no weights for them; use teachers that "
            "the trainer's ranks hold (where: trainer)"
        )
    if config.weight_sync.transport == "nccl":
        yield f"{key}: NCCL allows only one member per GPU; set weight_sync.transport: auto"
    if device == "cuda" and (name := _expandable(os.environ)) is not None:
        yield (f"{key}: {name} has expandable segments, which another process cannot map; remove them from it")
    for target, names in _PINNED.items():
        values = getattr(config.megatron, target)
        yield from (f"megatron.{target}.{name}: {why}; remove it, or set {key}: false" for name, why in names.items()
                    if values.get(name, "none") not in (None, False, "none"))  # fmt: skip


def _expandable(environment: Mapping[str, str]) -> str | None:
    """Return the variable, if any, that gives torch's allocator expandable segments."""
    return next((name for name in _ALLOCATOR if "expandable_segments:true" in environment.get(name, "").lower()), None)


def _needs_engines(config: Config, key: str) -> Iterator[str]:
    """Yield what would need engines while the trainer has their memory."""
    mode = config.admission.mode
    if mode not in ("sync", "stream"):
        yield f"{key}: with admission.mode: {mode} engines generate while the trainer trains; use sync or stream"
    if mode == "stream" and config.admission.max_uses > 1:
        uses = f"admission.max_uses: {config.admission.max_uses}"
        yield f"{key}: with {uses} groups start while the trainer trains; remove admission.max_uses"
    if config.evaluation.concurrent:
        yield f"{key}: evaluation.concurrent needs engines while the trainer trains; remove it"
    if config.gateway.enabled:
        yield f"{key}: requests of the gateway would wait while the trainer trains; set gateway.enabled: false"


# Why trainer and engines cannot wait for each other forever. A step always ends, because
#
# 1. its groups may start: the weights published before it leave room for it within the bound on staleness;
# 2. the groups that it waits for end: admission only waits for groups in flight, and generation and rewards have time
#    limits;
# 3. filters cannot block it: rollout replaces a bounded number of groups before each step (`refill_groups`),
#    and the trainer filters a batch after taking it;
# 4. reused groups (`admission.max_uses`) cannot block it: as many new groups may start as the step needs.
#
# 2 to 4 hold for every config. The tests of admission visit every state of small runs; a state in which nothing can
# happen exists exactly if 1 is violated.


def liveness_problems(admission: AdmissionConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield what would make rollout filter groups that the trainer trains on; `pace_problems` checks condition 1."""
    if admission.refill and not filters_equal_rewards(algorithm):
        yield (
            "admission.refill: it replaces the groups that algorithm.filter_zero_variance drops, which is off; set "
            "that to true, or refill to false"
        )


IMPORT_S = 600.0  # importing vLLM takes seconds, on a busy machine a minute
# The head sizes that vLLM's CPU attention supports (v1/attention/backends/cpu_attn.py).
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Fields that megarl sets, each with the reason or the key to use instead. Plan and replica refuse them.
RESERVED: dict[str, str] = {
    "model": "set model.path",
    "tokenizer": "set model.path",
    "tensor_parallel_size": "set rollout.tensor_parallel",
    "data_parallel_size": "set rollout.replicas",
    "pipeline_parallel_size": "an engine is split by rollout.tensor_parallel only",
    "distributed_executor_backend": "megarl needs mp: Ray's executor would use GPUs outside the replica",
    "max_model_len": "set rollout.max_model_len",
    "max_num_seqs": "set rollout.max_num_seqs",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "dtype": "set trainer.precision",
    "seed": "set run.seed",
    "enable_sleep_mode": "set rollout.share_gpus",
    "scheduling_policy": "megarl chooses it by evaluation.concurrent",
    "logprobs_mode": "megarl needs processed_logprobs: temperature must be in the engine's log-probs",
    "weight_transfer_config": "megarl needs its own weight transfer backend",
    "load_format": "megarl chooses it",
    "quantization": "a quantised engine samples from another policy than the trainer's",
    "trust_remote_code": "always false: Python code of a model never runs, and no supported family needs it",
    "enable_lora": "LoRA is not supported",
    "enable_return_routed_experts": "set trainer.router_replay",
    "skip_tokenizer_init": "always true: token ids in and out",
}


def engine_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yield a problem for each reserved field and, if vLLM is installed, for each unknown one."""
    for name in rollout.engine_kwargs:
        key = f"rollout.engine_kwargs.{name}"
        if name in RESERVED:
            yield f"{key}: reserved; {RESERVED[name]}"
        elif (known := engine_fields()) and name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            yield f"{key}: vLLM has no such field{'; did you mean ' + ' or '.join(near) + '?' if near else ''}"


def engine_key_problems(info: ModelInfo) -> Iterator[str]:
    """Yield a problem for each key that vLLM needs but the model's config.json lacks."""
    for key, value in FAMILIES[info.family].engine_keys.items():
        if info.raw.get(key) is None:
            yield (
                f"model.path: its config.json has no {key}, without which vLLM would compute another model; "
                f'add "{key}": {json.dumps(value)}, as the published files have it'
            )


def delta_net_problems(info: ModelInfo, *, recompute_kv: bool) -> Iterator[str]:
    """Yield a problem if engines would continue from states computed with old weights."""
    if info.delta and not recompute_kv:
        yield (
            "weight_sync.recompute_kv: DeltaNet states and cached prefixes would keep values of old weights; set it to "
            "true"
        )


def head_size_problems(info: ModelInfo, device: str) -> Iterator[str]:
    """Yield a problem if vLLM has no attention for the model's head size. On GPUs some backend supports any size."""
    if device == "cpu" and info.mla is None and info.head_dim not in CPU_HEAD_SIZES:
        listed = ", ".join(map(str, CPU_HEAD_SIZES))
        yield (
            f"model.path: its attention heads have {info.head_dim} channels (head_dim), but without a GPU vLLM's "
            f"attention only supports {listed}; use a model with one of these"
        )


@functools.cache
def engine_fields() -> frozenset[str]:
    """Return the names of AsyncEngineArgs' fields in the installed vLLM; empty if vLLM cannot be imported.

    A child process imports it, because `import vllm` changes settings of torch's compiler and of NVML.
    """
    listing = (
        "import dataclasses; from vllm.engine.arg_utils import AsyncEngineArgs; "
        "print(*[field.name for field in dataclasses.fields(AsyncEngineArgs)])"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=IMPORT_S
        )
    except (subprocess.SubprocessError, OSError):
        return frozenset()  # the engine refuses an unknown field when it starts
    return frozenset("".join(done.stdout.splitlines()[-1:]).split())
