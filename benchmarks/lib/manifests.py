"""The tensors of large models, as a sync sees them, without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.models.hf.read_config import info_from_config
from megarl.models.megatron.shards import table
from megarl.weights.plan.buckets import TensorSpec

_MODELS = Path(__file__).resolve().parents[2] / "examples" / "rl" / "models"
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": json.loads((_MODELS / "Qwen3-30B-A3B-Base" / "config.json").read_text()),
}
CONFIGS["Qwen3-235B-A22B"] = CONFIGS["Qwen3-30B-A3B"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
}
# Sizes of which the names, and so the number of tensors and of operations on them, are those of the large model.
TINY_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}


def manifest_of(
    config: dict[str, Any], *, expert_parallel: int, pipeline: int = 1, dtype: str = "bfloat16"
) -> list[TensorSpec]:
    """Return the manifest that an exporter would make, in its order.

    Owners are those of Megatron's order of ranks (tp-cp-ep-dp-pp) with one expert-parallel group per pipeline stage and
    data-parallel rank: rank 0 of a stage owns what is not an expert, and rank i the i-th part of the experts.
    """
    info = info_from_config(config)
    per_rank = (info.num_experts or 1) // expert_parallel
    layers_per_stage = -(-info.num_layers // pipeline)
    specs = []
    for entry in table(info).values():
        if entry.layer is None:
            stage = 0 if "embedding" in entry.megatron else pipeline - 1
        else:
            stage = entry.layer // layers_per_stage
        owner = stage * expert_parallel + (0 if entry.expert is None else entry.expert // per_rank)
        specs += [TensorSpec(name, shape, dtype, owner) for name, shape in zip(entry.names, entry.shapes, strict=True)]
    return specs
