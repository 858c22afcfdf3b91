"""Models of any size with random weights, for benchmarks whose results do not depend on what a model says."""

from pathlib import Path
from typing import Any

import torch

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


def make_model(directory: Path, *, moe: bool = False, delta: bool = False, **sizes: Any) -> None:
    """Write a seeded random Qwen3 in Hugging Face format, without a tokenizer.

    It is dense, or a mixture of experts (`moe`), or a Qwen3.5 with Gated DeltaNet layers (`delta`). `sizes`: fields of
    its config.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    fields = {"tie_word_embeddings": False, "dtype": "float32", **sizes}
    if moe:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**EXPERTS, **fields})).save_pretrained(directory)
    elif delta:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**DELTA, **fields})).save_pretrained(directory)
    else:
        Qwen3ForCausalLM(Qwen3Config(**fields)).save_pretrained(directory)
