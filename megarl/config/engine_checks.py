"""Checks the fields of `rollout.engine_kwargs` against vLLM's source, without importing vLLM."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import Config

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
