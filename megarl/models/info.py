"""What a Hugging Face `config.json` says about a model, in one shape for all families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megarl.models.rope import read_rope
from megarl.models.source import hf_files


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA): ranks of the compressed query and key/value, channels per head."""

    query_rank: int | None  # None: queries are not compressed
    kv_rank: int
    plain: int  # channels of queries and keys without position ("nope")
    rotated: int  # channels with rotary position ("rope"); a token's keys share one such vector
    value: int
    norm_eps: float  # of the two norms inside; the layers' own is ModelInfo.norm_eps


@dataclass(frozen=True)
class ModelInfo:
    """Architecture of one model. Sizes are of the whole model, never of a shard."""

    family: str
    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # {"rope_type": "llama3" | …, …} (see rope.py); None = plain RoPE
    norm_eps: float
    max_positions: int
    num_experts: int | None = None
    topk: int = 0
    moe_ffn: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()  # per layer: mixture of experts?
    shared_ffn: int = 0  # width of the shared experts, which every token passes, together; 0 = none
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_groups: tuple[int, int] | None = None  # (groups of experts, how many of them a token may use)
    router_scale: float = 1.0  # of the chosen experts' weights
    expert_bias: bool = False  # added to the scores when experts are chosen, not to their weights
    mla: LatentAttention | None = None  # head_dim is then plain + rotated, kv_heads is heads
    predict_layers: int = 0  # further layers of the files that predict later tokens (MTP); not part of the model
    window: int | None = None  # sliding attention: keys a query sees, itself included; None = all before it
    dtype: str = "float32"  # of the files, e.g. "bfloat16"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether global layer `layer` (from 0) is a mixture of experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    @property
    def dims(self) -> dict[str, int]:
        """Sizes by the symbols used in mapping rules (see mapping.Source)."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "moe_ffn": self.moe_ffn,
            "experts": self.num_experts or 0,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "shared_ffn": self.shared_ffn,
            **self._latent_dims,
        }

    @property
    def value_dim(self) -> int:
        """Channels per head of values and of attention's output."""
        return self.mla.value if self.mla else self.head_dim

    @property
    def _latent_dims(self) -> dict[str, int]:
        if self.mla is None:
            return {}
        return {
            "q_rank": self.mla.query_rank or 0,
            "kv_rank": self.mla.kv_rank,
            "latent": self.mla.kv_rank + self.mla.rotated,
            "kv_up": self.heads * (self.mla.plain + self.mla.value),
            "values": self.heads * self.mla.value,
        }


def load_info(model_dir: Path | str) -> ModelInfo:
    """Read `config.json` of a Hugging Face directory or a Megatron checkpoint (old and new key styles).

    Raises ValueError naming the file and the field for a missing directory, an unknown architecture, or a
    feature that would be silently wrong if ignored.
    """
    path = hf_files(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{path} not found: a model is a Hugging Face directory with a config.json, or a Megatron checkpoint"
        )
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it must be a JSON object")
        return info_from_config(raw)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # Beyond the first two: a field of another type, or a size of 0, wherever it happens to be used first.
        what = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {what}") from error


def info_from_config(raw: Mapping[str, Any]) -> ModelInfo:
    """`load_info` on the parsed `config.json`."""
    from megarl.models.families import FAMILIES

    names = raw.get("architectures") or []
    family = next((f for f in FAMILIES.values() if f.architecture in names), None)
    if family is None:
        supported = ", ".join(f.architecture for f in FAMILIES.values())
        raise ValueError(f"architecture {names} is not supported; supported: {supported}")
    given, raw = raw, {**family.defaults, **raw}
    _refuse(raw)
    theta, scaling = read_rope(raw)
    heads = int(raw["num_attention_heads"])
    fields: dict[str, Any] = {
        "family": family.name,
        "num_layers": int(raw["num_hidden_layers"]),
        "hidden": int(raw["hidden_size"]),
        "ffn": int(raw["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or raw["hidden_size"] // heads),
        "vocab_size": int(raw["vocab_size"]),
        "tied": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": False,
        "qk_norm": False,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_positions": int(raw["max_position_embeddings"]),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        "raw": dict(given),
    }
    return ModelInfo(**{**fields, **family.read(raw)})


def _refuse(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported; set it to false for full attention")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias=true is not supported")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantized checkpoints are not supported; use the bf16 or fp32 weights. If these are, cast from quantized "
            "ones, delete quantization_config"
        )
