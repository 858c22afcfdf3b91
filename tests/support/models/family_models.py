"""Tiny models of every family, with numbers off their defaults, and texts that show every one of these numbers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from megarl import platforms
from tests.support.models.tiny import make_tiny_model
from tests.support.models.tiny_vision import make_tiny_vision

# `transformers` must give the same answers with the CPU emulation active as without.
platforms.activate()

Batch = list[list[list[int]]]
VOCAB = 101  # prime: padded under every TP

# Models of the tests: family and what differs from tests/support/models/tiny.py. Texts of `BATCH` are up to 60 tokens,
# so they go beyond each scaled RoPE's original context (and all three bands of wavelengths are seen) and each window.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 24,
            }
        },
    ),
    # As many key and value heads as queries, plain RoPE.
    "llama2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "mistral": ("mistral", {"sliding_window": 13, "rms_norm_eps": 1e-5}),
    "mistral_full": ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
    "mixtral": ("mixtral", {"rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_yarn": (
        "qwen2",
        {
            "hidden_size": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            },
        },
    ),
    "qwen3": ("qwen3", {"rope_theta": 5e5}),
    "qwen3_yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.4,
                "beta_fast": 0.5,
                "beta_slow": 0.05,
                "truncate": False,
            }
        },
    ),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
                "beta_fast": 0.25,
                "beta_slow": 0.02,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    # Plain queries, plain RoPE, no groups, another eps outside attention than inside.
    "moonlight": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-3, "rope_theta": 50000.0},
    ),
    "glm4_moe": ("glm4_moe", {"rms_norm_eps": 1e-5}),
    # Neither norms of queries and keys nor biases, as GLM-4.5-Air has no norms; RoPE over a quarter of the channels.
    "glm4_moe_air": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "n_shared_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    # Two dense layers, which only `mlp_layer_types` says.
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {"rms_norm_eps": 1e-5, "first_k_dense_replace": None, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2},
    ),
    "qwen3_5": ("qwen3_5", {"rms_norm_eps": 1e-5}),
    "qwen3_5_moe": ("qwen3_5_moe", {"rms_norm_eps": 1e-5}),
    # A dense layer, more rotated channels, two value heads per key head, DeltaNet last.
    "qwen3_next": (
        "qwen3_next",
        {
            "mlp_only_layers": [1],
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_num_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
}
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # compared with transformers in tests/trainer/test_vision.py
MOE = (
    "deepseek_v3", "glm4_moe", "glm4_moe_air", "glm4_moe_lite", "mixtral", "moonlight", "qwen3_5_moe", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip
# Single tokens, equal neighbours, one long text alone, totals that TP must pad.
LENGTHS = [(5, 5, 17, 60), (45,), (7, 1, 9), (3, 3, 4)]


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths] for lengths in LENGTHS]


def family_models(root: Path) -> Callable[[str], Path]:
    """A function from a name of MODELS or VISION to that model's directory below `root`; each is written once."""

    @cache
    def make(name: str) -> Path:
        if name in VISION:
            (root / name).mkdir()
            return make_tiny_vision(root / name, name)
        family, changes = MODELS[name]
        shape = {"num_hidden_layers": 4, "vocab_size": VOCAB, **changes}
        if "rope_parameters" in shape:
            shape["rope_theta"] = None
        return make_tiny_model(root / name, family, **shape)

    return make
