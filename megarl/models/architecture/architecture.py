"""A model's architecture, read from its Hugging Face `config.json` into the same fields for every family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA, arXiv 2405.04434): compression ranks, and channels per head."""

    query_rank: int | None  # None: queries are not compressed
    kv_rank: int
    plain: int  # channels of queries and keys without RoPE (qk_nope_head_dim)
    rotated: int  # channels with RoPE (qk_rope_head_dim); a token's key heads share one such vector
    value: int  # channels of values (v_head_dim)
    norm_eps: float  # of the two norms inside attention; the layers' norms have ModelInfo.norm_eps


DELTA_CHUNK = 64  # tokens per chunk of the gated delta rule; the products inside a chunk grow with its square


@dataclass(frozen=True)
class DeltaNet:
    """Which layers are Gated DeltaNet (arXiv 2412.06464) instead of attention, and their sizes."""

    layers: tuple[bool, ...]
    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # channels of a key head
    value_dim: int
    conv: int  # tokens that the convolution before the rule sees

    @property
    def keys(self) -> int:
        """Channels of all key heads; the queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Elements of a sequence's state in one layer, without the convolution's."""
        return self.values * self.key_dim


@dataclass(frozen=True)
class VisionTower:
    """The vision tower of a vision-language model, and how images enter the language model.

    Images are cut into patches of `patch` x `patch` pixels in `channels` colours, each repeated over `frames` frames.
    Squares of `merge` x `merge` patches become one token. Pixels (0 to 255) are divided by 255, then shifted by `mean`
    and divided by `std`, per channel.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    patch: int
    frames: int
    merge: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rope_sections: tuple[int, ...]  # frequencies of the language model's RoPE that rotate by time, height and width
    rope_interleaved: bool = False  # the axes alternate between frequencies; otherwise each has one block
    places: int = 0  # learned position embeddings; 0 = none
    deepstack: tuple[int, ...] = ()  # its layers whose features are added to the outputs of the first language layers

    @property
    def patch_size(self) -> int:
        """Values per patch, as the image processor returns it."""
        return self.channels * self.frames * self.patch**2


@dataclass(frozen=True)
class ModelInfo:
    """The architecture of one model. Sizes are those of the whole model, never of a shard."""

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
    rotary_dim: int | None = None  # channels per head that RoPE rotates, the first ones; None = all
    num_experts: int | None = None
    topk: int = 0
    moe_ffn: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()  # per layer: true for a mixture of experts; () = none
    shared_ffn: int = 0  # total width of the shared experts, which see every token; 0 = none
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_groups: tuple[int, int] | None = None  # (groups of experts, groups that a token may use); None = no groups
    router_scale: float = 1.0  # factor on the chosen experts' weights
    expert_bias: bool = False  # a bias on the scores that choose the experts, not on the experts' weights
    shared_expert_gate: bool = False  # a sigmoid per token scales the shared experts' output
    attention_gate: bool = False  # a sigmoid gate per query head multiplies attention's output
    zero_centered_norms: bool = False  # norms multiply by 1 + weight, except the one inside a DeltaNet layer
    delta: DeltaNet | None = None
    mla: LatentAttention | None = None  # if set, head_dim is plain + rotated and kv_heads equals heads
    predict_layers: int = 0  # multi-token prediction (MTP) layers in the files; not part of the model
    window: int | None = None  # sliding window: keys that a query sees, including its own; None = all earlier ones
    vision: VisionTower | None = None  # None: the model reads text only
    dtype: str = "float32"  # dtype of the files, e.g. "bfloat16"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether global layer `layer` (counted from 0) is a mixture of experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    def is_delta_layer(self, layer: int) -> bool:
        """Return whether global layer `layer` (counted from 0) is Gated DeltaNet."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.num_layers - (sum(self.delta.layers) if self.delta else 0)

    @property
    def dims(self) -> dict[str, int]:
        """Sizes by the symbols of mapping rules (see mapping.Source)."""
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
            "one": 1,
            "q_gated": 2 * self.heads * self.head_dim,
            **self._delta_dims,
            **self._latent_dims,
            **self._vision_dims,
        }

    @property
    def value_dim(self) -> int:
        """Channels per head of the values and of attention's output."""
        return self.mla.value if self.mla else self.head_dim

    @property
    def _delta_dims(self) -> dict[str, int]:
        delta = self.delta
        if delta is None:
            return {}
        return {
            "delta_mixed": 2 * delta.keys + delta.values,
            "delta_values": delta.values,
            "delta_heads": delta.value_heads,
            "delta_value": delta.value_dim,
            "delta_conv": delta.conv,
            "delta_qkvz": 2 * delta.keys + 2 * delta.values,
            "delta_ba": 2 * delta.value_heads,
        }

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

    @property
    def _vision_dims(self) -> dict[str, int]:
        tower = self.vision
        if tower is None:
            return {}
        return {
            "v_hidden": tower.hidden,
            "v_ffn": tower.ffn,
            "v_qkv": 3 * tower.hidden,
            "v_merged": tower.merge**2 * tower.hidden,
            "v_places": tower.places,
            "v_channels": tower.channels,
            "v_frames": tower.frames,
            "v_patch": tower.patch,
        }
