"""Llama 2 and 3, Mistral 7B (Llama's layers; sliding-window attention in the first release) and Mixtral.

Mixtral has the same attention and a mixture of experts in every layer, under other names.
"""

from collections.abc import Mapping
from typing import Any

from megarl.models.families.base import (
    ATTENTION,
    DENSE,
    EMBEDDING,
    HEAD,
    NORMS,
    Family,
    expert_rules,
    no_attention_bias,
    refuse_single_expert,
    sliding_window,
)

LLAMA_FAMILY = Family("llama", "LlamaForCausalLM", DENSE, no_attention_bias)
FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    DENSE,
    lambda raw: {"window": sliding_window(raw)},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)


def _read_mixtral(raw: Mapping[str, Any]) -> dict[str, Any]:
    refuse_single_expert(raw)
    return {
        "window": sliding_window(raw),
        "num_experts": int(raw["num_local_experts"]),
        "topk": int(raw["num_experts_per_tok"]),
        "moe_ffn": int(raw["intermediate_size"]),
        "moe_layers": (True,) * int(raw["num_hidden_layers"]),
    }


# The published names. transformers 5 reads and writes them, although its modules are `mlp.gate` and `mlp.experts`.
_EXPERTS = expert_rules("block_sparse_moe.gate", "block_sparse_moe.experts", projections=("w1", "w3", "w2"))

MIXTRAL_FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    EMBEDDING + NORMS + ATTENTION + _EXPERTS + HEAD,
    _read_mixtral,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
