"""config.json in its old and new styles; what would be silently wrong is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megarl.models.architecture.rope import attention_factor, inverse_frequencies
from megarl.models.hf.read_config import info_from_config, load_info
from megarl.models.megatron.build_model import padded_vocab
from tests.support.models.tiny import FAMILIES as TINY
from tests.support.models.tiny import make_tiny_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
MISTRAL = LLAMA | {"num_key_value_heads": 2, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
QWEN3_MOE = LLAMA | {
    "num_key_value_heads": 2,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_experts": 8,
}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4,
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
GLM = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
FLASH = DEEPSEEK | {"architectures": ["Glm4MoeLiteForCausalLM"], "n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
UNUSUAL = {"rope_theta": 12345.0, "rms_norm_eps": 1e-3}
EXPERTS = {"n_routed_experts", "num_experts", "num_local_experts"}
# Without them there is no model to speak of.
SHAPES = {
    *EXPERTS, "hidden_size", "intermediate_size", "kv_lora_rank", "max_position_embeddings", "moe_intermediate_size",
    "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "vocab_size",
}  # fmt: skip
SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_old_and_new_keys_mean_the_same() -> None:
    old = info_from_config(
        LLAMA | {"rope_theta": 5e5, "torch_dtype": "bfloat16", "rope_scaling": {"type": "llama3", **SCALING}}
    )
    new = info_from_config(
        LLAMA | {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **SCALING}}
    )
    assert old == new
    assert (old.rope_theta, old.dtype, old.kv_heads, old.head_dim) == (5e5, "bfloat16", 4, 16)


def test_both_rope_keys_may_say_the_same() -> None:
    raw = LLAMA | {"rope_theta": 1e6, "rope_scaling": YARN}
    both = raw | {"rope_parameters": {**YARN, "rope_theta": 1e6}, "original_max_position_embeddings": 64}
    assert info_from_config(both) == info_from_config(raw)
    assert info_from_config(raw | {"rope_scaling": None}).rope_theta == 1e6


def _old_style(config: dict[str, Any]) -> dict[str, Any]:
    """The config as published before transformers 5: its keys renamed since."""
    rope = config.get("rope_parameters", {})
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": rope["rope_theta"], "torch_dtype": config["dtype"], "rope_scaling": None}
    if config["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    return old


@pytest.mark.parametrize("style", [dict, _old_style])
@pytest.mark.parametrize("family", TINY)
def test_an_absent_key_means_what_it_means_to_transformers(family: str, style: Any, tmp_path: Path) -> None:
    """Each key of a config taken away in turn: the same model as transformers' own defaults written out, or refused.

    Numbers of the config that is begun with are none of the defaults.
    """
    config_class = TINY[family][0]
    full = json.loads((make_tiny_model(tmp_path, family, **UNUSUAL) / "config.json").read_text())
    full = style(full)
    assert len(full) > 20
    refused = set()
    for key in [None, *sorted(set(full) - {"architectures", "model_type"})]:
        raw = {name: value for name, value in full.items() if name != key}
        try:
            ours = info_from_config(raw)
        except (KeyError, ValueError) as error:
            said = "experts" if key in EXPERTS else str(key)  # the number of experts has a name in each style
            assert said in str(error), (key, error)
            refused.add(key)
            continue
        written = config_class(**raw).to_dict()
        assert ours == info_from_config({**written, "architectures": raw["architectures"]}), key
    assert refused <= SHAPES | {"num_key_value_heads"}


def test_default_rope_is_no_scaling() -> None:
    info = info_from_config(LLAMA | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}})
    assert (info.rope_theta, info.rope_scaling) == (1e6, None)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            LLAMA | {"architectures": None},
            "'architectures' is missing; set it to a list with one of: Dee",
        ),
        (
            LLAMA | {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel'\] is not supported: no family has its names of tensors; docs/training/models\.md lists",
        ),
        (
            LLAMA | {"architectures": ["JambaForCausalLM"], "mamba_d_state": 16, "num_experts": 16},
            r"no family has its layers \(state space\), its router of 16 experts, its names of tensors; docs/training",
        ),
        (
            LLAMA
            | {
                "architectures": ["GptOssForCausalLM"],
                "num_local_experts": 32,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            r"no family has its layers \(full_attention, sliding_attention\), its router of 32 experts, its names",
        ),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {"layer_types": ["full_attention"], "rope_scaling": {"type": "longrope"}},
            },
            r"no family has its RoPE \(longrope\), its names of tensors; docs/training/models\.md lists what works$",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 4}},
            r"RoPE scaling 'longrope' is not supported.*; docs/training/models\.md lists what works$",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3"}}, "needs factor, low_freq_factor, high_freq_factor"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": YARN},
            "rope_parameters and rope_scaling contradict each other",
        ),
        (
            LLAMA | {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": YARN},
            "rope_parameters and rope_scaling contradict each other",
        ),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
            r"each kind of attention \(full_attention\)",
        ),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            LLAMA | {"original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "original_max_position_embeddings must be inside",
        ),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "'full_attention'.*every layer"),
        (LLAMA | {"attention_bias": True}, "attention_bias"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA | {"use_sliding_window": True}, "use_sliding_window"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None"),
        (LLAMA | {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "move it to the top level"),
        (GLM | {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be"),
        (FLASH | {"mlp_layer_types": ["sparse"] * 2}, "mlp_layer_types contradicts"),
        (FLASH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DEEPSEEK | {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK | {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        (DEEPSEEK | {"num_experts_per_tok": 2}, "num_experts_per_tok=2 with topk_group=2"),
        (DEEPSEEK | {"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok=1"),
        (DEEPSEEK | {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "'linear' is not supported in this family"),
        (DEEPSEEK | {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.1}}, "attention_factor"),
        (DEEPSEEK | {"rope_scaling": {"type": "yarn", "factor": 2, "mscale_all_dim": 1.0}}, "needs mscale"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "missing key 'hidden_size'"),
    ],
)
def test_refusals_name_the_file_and_the_field(raw: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message) as caught:
        load_info(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not found"):
        load_info(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
    ],
)
def test_which_layers_are_experts(changes: dict[str, Any], layers: tuple[bool, ...]) -> None:
    info = info_from_config(QWEN3_MOE | {"num_hidden_layers": 4, **changes})
    assert info.moe_layers == layers
    assert (info.num_experts, info.topk, info.moe_ffn, info.norm_topk_prob) == (8, 2, 16, False)


def test_what_transformers_writes_today_is_read() -> None:
    """It calls the number of experts num_local_experts."""
    written = Qwen3MoeConfig(num_experts=6, num_hidden_layers=3, architectures=["Qwen3MoeForCausalLM"]).to_dict()
    assert info_from_config(written).num_experts == 6


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", **SCALING},
        {"rope_type": "llama3", **SCALING, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0},
        {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 8, "beta_slow": 2},
    ],
)
def test_rope_equals_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 5e5, **scaling},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    info = info_from_config(LLAMA | {"head_dim": 64, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    ours = inverse_frequencies(info.head_dim, info.rope_theta, info.rope_scaling)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert attention_factor(info.rope_scaling) == pytest.approx(factor)


def test_latent_attention_and_its_router() -> None:
    info = info_from_config(DEEPSEEK)
    assert info.mla is not None and info.mla.norm_eps == 1e-6 != info.norm_eps
    assert (info.head_dim, info.value_dim, info.kv_heads) == (24, 12, 4)
    assert (info.moe_layers, info.shared_ffn) == ((False, True), 48)
    assert (info.router_score, info.router_groups, info.router_scale) == ("sigmoid", (4, 2), 2.5)
    # Groups that limit nothing are no groups, whatever else their numbers would mean.
    for groups in ({"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 4}, {"n_group": None}):
        assert info_from_config(DEEPSEEK | groups).router_groups is None


def test_partial_rope_and_layers_of_glm() -> None:
    assert info_from_config(GLM).rotary_dim == 8
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    assert info_from_config(GLM | inside).rotary_dim == 4
    assert info_from_config(GLM | {"attention_bias": True}).qkv_bias
    kinds = ["dense", "sparse"]
    assert info_from_config(FLASH | {"mlp_layer_types": kinds}) == info_from_config(FLASH)
    assert info_from_config(FLASH | {"mlp_layer_types": kinds[::-1], "first_k_dense_replace": None}).moe_layers == (
        True,
        False,
    )


def test_a_tiny_deepseek_says_what_vllm_needs(tmp_path: Path) -> None:
    """vLLM makes the expert bias only under `topk_method: noaux_tc`, as published; transformers keeps the key."""
    directory = make_tiny_model(tmp_path, "deepseek_v3")
    assert json.loads((directory / "config.json").read_text())["topk_method"] == "noaux_tc"
    assert AutoConfig.from_pretrained(directory).topk_method == "noaux_tc"
    assert load_info(directory).expert_bias


def test_windows() -> None:
    assert info_from_config(MISTRAL).window == 4096
    assert info_from_config(MISTRAL | {"layer_types": ["sliding_attention"] * 2}).window == 4096
    assert info_from_config(MISTRAL | {"sliding_window": None}).window is None
    # Of a family that ignores it: Qwen2's window is off unless use_sliding_window says otherwise.
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
    assert info_from_config(qwen).window is None


def test_vocabulary_is_padded_to_tp_only() -> None:
    info = info_from_config(LLAMA | {"vocab_size": 151_936})
    assert [padded_vocab(info, tp) for tp in (1, 2, 3, 8)] == [151_936, 151_936, 151_938, 151_936]


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "linear", "factor": 1.5}, 768),
        (YARN, 512),  # max_position_embeddings is the extended length there
    ],
)
def test_the_longest_sequence_is_that_of_vllm(scaling: dict[str, Any] | None, positions: int) -> None:
    assert info_from_config({**LLAMA, "rope_scaling": scaling}).max_positions == positions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", -4), ("num_attention_heads", 0), ("num_hidden_layers", 10**9), ("vocab_size", 10**15),
        ("intermediate_size", 0), ("max_position_embeddings", -1),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} must be between 1 and"):
        info_from_config(LLAMA | {name: value})


@pytest.mark.parametrize(("changes", "fits"), [({"norm_topk_prob": True}, False), ({"norm_topk_prob": False}, True)])
def test_a_single_expert_with_weight_1_is_refused(changes: dict[str, Any], fits: bool) -> None:
    raw = QWEN3_MOE | {"num_experts_per_tok": 1} | changes
    if fits:
        assert info_from_config(raw).topk == 1
        return
    with pytest.raises(ValueError, match="num_experts_per_tok=1 is not supported"):
        info_from_config(raw)
