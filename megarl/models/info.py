"""What a Hugging Face `config.json` says about a model, in one shape for all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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
