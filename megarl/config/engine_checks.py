"""Checks the fields of `rollout.engine_kwargs` against vLLM's source, without importing vLLM."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import Config
from megarl.models.info import ModelInfo

# Fields that megarl sets itself, each with the reason or the key to use instead. Plan and replica refuse them.
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
    "enforce_eager": "set rollout.enforce_eager",
    "dtype": "set rollout.dtype",
    "seed": "set run.seed",
    "scheduling_policy": "megarl chooses it by evaluation.concurrent",
    "logprobs_mode": "megarl needs processed_logprobs: temperature must be in the engine's log-probs",
    "weight_transfer_config": "megarl needs its own weight transfer backend",
    "load_format": "megarl chooses it",
    "quantization": "a quantised engine samples from another policy than the trainer's",
    "trust_remote_code": "always false: Python code that comes with a model never runs, no supported family needs it",
    "enable_lora": "LoRA is not supported",
    "skip_tokenizer_init": "always true: token ids in and out",
}


def engine_problems(config: Config) -> Iterator[str]:
    """Yield a problem for each reserved field, and for each unknown one if vLLM is installed."""
    known = engine_fields()
    for name in config.rollout.engine_kwargs:
        key = f"rollout.engine_kwargs.{name}"
        if name in RESERVED:
            yield f"{key}: reserved; {RESERVED[name]}"
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            yield f"{key}: vLLM has no such field{'; did you mean ' + ' or '.join(near) + '?' if near else ''}"


def head_size_problems(info: ModelInfo, device: str) -> Iterator[str]:
    """Yield a problem if vLLM has no attention for the model's heads. On GPUs one of its backends takes any size."""
    sizes = cpu_head_sizes() if device == "cpu" and info.mla is None else ()
    if sizes and info.head_dim not in sizes:
        listed = ", ".join(map(str, sizes))
        yield (
            f"model.path: its attention heads have {info.head_dim} channels (head_dim), and vLLM's attention without a "
            f"GPU takes {listed} only; use a model with one of these"
        )


@functools.cache
def cpu_head_sizes() -> tuple[int, ...]:
    """Return the sizes of heads that the installed vLLM's attention on CPU takes; empty if that is unknown."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return ()
    path = Path(spec.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    if not path.is_file():
        return ()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            returned = node.body[-1]
            if isinstance(returned, ast.Return) and isinstance(returned.value, ast.List):
                return tuple(each.value for each in returned.value.elts if isinstance(each, ast.Constant))  # type: ignore[misc]
    return ()


@functools.cache
def engine_fields() -> frozenset[str]:
    """Return the names of AsyncEngineArgs' fields in the installed vLLM; empty if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    path = Path(spec.origin).parent / "engine" / "arg_utils.py"
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            names |= {
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
    return frozenset(names)
