"""Tiny vision-language models with tokenizer, chat template and image processor; and drawn pictures for them.

`make_tiny_vision(dir, family="qwen2_5_vl")` writes a Hugging Face directory that transformers, vLLM and megarl load.
Weights have std 0.1, because at 0.02 mistakes of positions hardly move the log-probs.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.tiny import EOS, PAD, START

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", "qwen3_vl_moe": "Qwen3VLProcessor"}


def vision_tokenizer() -> Any:
    """A tokenizer of bytes, without merges, and with the special tokens of vision-language models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, pad_token=PAD)
    specials = [PAD, START, EOS, VISION_START, VISION_END, IMAGE, VIDEO]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _text(family: str, vocab: int, overrides: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "initializer_range": 0.1, "tie_word_embeddings": False, "use_sliding_window": False, "bos_token_id": None,
    }  # fmt: skip
    if family == "qwen2_5_vl":
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    else:
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text["head_dim"] = 32
    if family == "qwen3_vl_moe":
        # 2 * moe_intermediate_size must differ from hidden_size: fused experts could else be read transposed.
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1,
                 "norm_topk_prob": True, "mlp_only_layers": []}  # fmt: skip
    return text | {"rope_parameters": rope} | overrides


def _vision(family: str, hidden: int) -> dict[str, Any]:
    vision: dict[str, Any] = {
        "depth": 4, "num_heads": 4, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "initializer_range": 0.1, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": hidden,
        "patch_size": PATCH[family],
    }  # fmt: skip
    if family == "qwen2_5_vl":
        return vision | {"window_size": 56, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2}
    return vision | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}


def make_tiny_vision(directory: Path, family: str = "qwen2_5_vl", seed: int = 0, **text: Any) -> Path:
    """Write a model of `family` with random weights; `text` replaces fields of the language model's config."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = vision_tokenizer()
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in {
            "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }.items()
    }  # fmt: skip
    sizes = _text(family, 512, {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **text})
    vision = _vision(family, sizes["hidden_size"])
    tied = sizes["tie_word_embeddings"]
    config = AutoConfig.for_model(family, text_config=sizes, vision_config=vision, tie_word_embeddings=tied, **ids)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # zero biases and unit norms would hide a wrong mapping
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    weights = directory / "model.safetensors"
    # transformers 5.19 reads fused experts as published, [experts, in, out], and saves them transposed.
    tensors = load_file(weights)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(
        directory
    )
    half = {} if family == "qwen2_5_vl" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    Qwen2VLImageProcessorPil(size=size, patch_size=PATCH[family], **half).save_pretrained(directory)
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": PROCESSORS[family]}))
    return directory


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return the file of a smooth random image."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(out, kind)
    return out.getvalue()
