"""The tables of published models: number of tensors and parameters as in their safetensors indices."""

from typing import Any

import pytest
import torch

from megarl.config.memory_plan.parameters import model_parameters
from megarl.models.hf.read_config import info_from_config
from megarl.models.megatron.shards import table


def _config(architecture: str, sizes: tuple[int, int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    layers, hidden, ffn, heads, kv_heads, vocab, positions = sizes
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        **more,
    }


_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "Llama-2-7B": (_config("LlamaForCausalLM", (32, 4096, 11008, 32, 32, 32000, 4096)), 291, 6_738_415_616),
    "Llama-3.1-8B": (_config("LlamaForCausalLM", (32, 4096, 14336, 32, 8, 128256, 131072)), 291, 8_030_261_248),
    "Mistral-7B-v0.1": (
        _config("MistralForCausalLM", (32, 4096, 14336, 32, 8, 32000, 32768), sliding_window=4096),
        291,
        7_241_732_096,
    ),
    "Mixtral-8x7B": (
        _config("MixtralForCausalLM", (32, 4096, 14336, 32, 8, 32000, 32768), num_local_experts=8,
                num_experts_per_tok=2),
        995,
        46_702_792_704,
    ),
    "Qwen2.5-0.5B": (
        _config("Qwen2ForCausalLM", (24, 896, 4864, 14, 2, 151936, 32768), tie_word_embeddings=True),
        290,
        494_032_768,
    ),
    # Without the layer that predicts a second token: 61 layers, 3 of them dense.
    "DeepSeek-V3": (
        _config("DeepseekV3ForCausalLM", (61, 7168, 18432, 128, 128, 129280, 163840), q_lora_rank=1536,
                kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256,
                num_experts_per_tok=8,
                n_group=8, topk_group=4, n_shared_experts=1, moe_intermediate_size=2048,
                first_k_dense_replace=3,
                routed_scaling_factor=2.5, num_nextn_predict_layers=1),
        3 * (2 + 7 + 3) + 58 * (2 + 7 + 2 + 3 * 257) + 3,
        671_026_404_352,
    ),
    # GLM and Kimi-K2: parameters as their config.json give them (cards: 106B, 30B, 1T), without layers that predict
    # later tokens.
    "GLM-4.5-Air": (
        _config("Glm4MoeForCausalLM", (46, 4096, 10944, 96, 8, 151552, 131072), head_dim=128, attention_bias=True,
                use_qk_norm=False, partial_rotary_factor=0.5, n_routed_experts=128, num_experts_per_tok=8, n_group=1,
                topk_group=1, n_shared_experts=1, moe_intermediate_size=1408, first_k_dense_replace=1,
                num_nextn_predict_layers=1),
        (2 + 7 + 3) + 45 * (2 + 7 + 2 + 3 * 129) + 3,
        106_852_245_504,
    ),
    "GLM-4.7-Flash": (
        _config("Glm4MoeLiteForCausalLM", (47, 2048, 10240, 20, 20, 154880, 202752), q_lora_rank=768, kv_lora_rank=512,
                qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=64, num_experts_per_tok=4,
                n_group=1, topk_group=1, n_shared_experts=1, moe_intermediate_size=1536, first_k_dense_replace=1,
                num_nextn_predict_layers=1),
        (2 + 7 + 3) + 46 * (2 + 7 + 2 + 3 * 65) + 3,
        29_943_390_976,
    ),
    "Kimi-K2": (
        _config("DeepseekV3ForCausalLM", (61, 7168, 18432, 64, 64, 163840, 131072), q_lora_rank=1536, kv_lora_rank=512,
                qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=384, num_experts_per_tok=8,
                n_group=1, topk_group=1, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=1,
                num_nextn_predict_layers=0),
        (2 + 7 + 3) + 60 * (2 + 7 + 2 + 3 * 385) + 3,
        1_026_408_209_408,
    ),
    "Qwen3-30B-A3B": (
        _config("Qwen3MoeForCausalLM", (48, 2048, 6144, 32, 4, 151936, 40960), moe_intermediate_size=768, **_QWEN3_MOE),
        18_867,
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        _config("Qwen3MoeForCausalLM", (94, 4096, 12288, 64, 4, 151936, 40960), moe_intermediate_size=1536,
                **_QWEN3_MOE),
        36_945,
        235_093_634_560,
    ),
    # As transformers' classes count them with their defaults, which are these models' sizes. Qwen3.5's config has the
    # text model inside, next to a tower that is not read.
    "Qwen3.5-9B": (
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {},
         "text_config": _config("", (32, 4096, 12288, 16, 4, 248320, 262144), full_attention_interval=4)},
        427,
        8_953_803_264,
    ),
    "Qwen3.5-35B-A3B": (
        {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {},
         "text_config": _config("", (40, 2048, 5632, 16, 2, 248320, 262144))},
        693 + 40 * (3 * 256 - 2),
        34_660_610_688,
    ),
    "Qwen3-Next-80B-A3B": (
        _config("Qwen3NextForCausalLM", (48, 2048, 5632, 16, 2, 151936, 262144)),
        759 + 48 * (3 * 512 - 2),
        79_674_391_296,
    ),
    # The language model's fields stand next to those of the tower, as published.
    "Qwen2.5-VL-7B": (
        _config("Qwen2_5_VLForConditionalGeneration", (28, 3584, 18944, 28, 4, 152064, 128000),
                rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
                vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                               "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14}),
        729,
        8_292_166_656,
    ),
    "Qwen3-VL-8B": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": False,
         "text_config": _config("", (36, 4096, 12288, 32, 8, 151936, 262144), head_dim=128,
                                rope_scaling={"rope_type": "default", "mrope_section": [24, 20, 20],
                                              "mrope_interleaved": True}),
         "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
                           "out_hidden_size": 4096, "patch_size": 16, "num_position_embeddings": 2304,
                           "deepstack_visual_indexes": [8, 16, 24]}},
        750,
        8_767_123_696,
    ),
    "Qwen3-VL-30B-A3B": (
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "tie_word_embeddings": False,
         "text_config": _config("", (48, 2048, 6144, 32, 4, 151936, 262144), moe_intermediate_size=768,
                                rope_scaling={"rope_type": "default", "mrope_section": [24, 20, 20]}, **_QWEN3_MOE),
         "vision_config": {"out_hidden_size": 2048}},
        18_867 + 351,
        31_070_754_032,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_and_parameters(name: str) -> None:
    raw, tensors, parameters = PUBLISHED[name]
    info = info_from_config(raw)
    shapes = [shape for entry in table(info).values() for shape in entry.shapes if not entry.rule.buffer]
    names = [each for entry in table(info).values() for each in entry.names]
    assert len(names) == len(set(names)) == tensors
    assert sum(torch.Size(shape).numel() for shape in shapes) == parameters
    assert model_parameters(info)[0] == parameters


def test_dense_and_sparse_layers_mix() -> None:
    raw, tensors, _ = PUBLISHED["Qwen3-30B-A3B"]
    names = set(table(info_from_config(raw | {"mlp_only_layers": [0, 47]})))
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names and "decoder.layers.0.mlp.router.weight" not in names
    assert "decoder.layers.1.mlp.router.weight" in names
    moe = info_from_config(raw | {"mlp_only_layers": [0, 47]})
    assert sum(len(entry.names) for entry in table(moe).values()) == tensors - 2 * (1 + 3 * 128) + 2 * 3
