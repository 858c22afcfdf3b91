"""A small Qwen2.5-VL with its chat template and image processor, for square pictures of one size.

Shape suffixes: N pictures, B sequences per batch, L tokens per padded sequence, P patches per picture, C numbers per
patch.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SIDE = 56  # of a picture, in pixels
PATCH, MERGE = 14, 2  # side of a patch in pixels, and of a token in patches
TOKENS = (SIDE // (PATCH * MERGE)) ** 2  # per picture
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

# ChatML in which an image is one token between two markers, as in Qwen's own template.
IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def image_prompt(tokenizer: PreTrainedTokenizerFast, problem: str) -> str:
    """Return the chat prompt's text for a picture and a question, with all of the picture's tokens."""
    content = [{"type": "image"}, {"type": "text", "text": problem}]
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return text.replace(IMAGE, IMAGE * TOKENS)


def build_seeing_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Make a randomly initialised Qwen2.5-VL of about 0.7 M parameters, and add its special tokens to the tokenizer.

    Its heads and vocabulary are divisible by TP=2.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": [VISION_START, VISION_END, IMAGE, VIDEO]})
    start, end, image, video = tokenizer.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE, VIDEO])
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "use_sliding_window": False, "tie_word_embeddings": True, "initializer_range": 0.06, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128, "num_heads": 2,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "window_size": 2 * SIDE,
        "fullatt_block_indexes": [0, 1], "tokens_per_second": 2, "initializer_range": 0.06,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        dtype="float32",
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def image_processor() -> Qwen2VLImageProcessorPil:
    """Return the image processor. It uses the Pillow backend, as megarl and its engines do."""
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2}, patch_size=PATCH, merge_size=MERGE
    )


def save_image_processor(directory: Path) -> None:
    """Write the image processor's settings, naming the processor class that includes the tokenizer."""
    settings = image_processor().to_dict() | {"processor_class": "Qwen2_5_VLProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def image_inputs(pictures: Sequence[bytes], image_token: int) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Return a function of a batch's rows [B], which index `pictures`, and its token ids [B, L].

    It returns a vision model's inputs other than the ids.
    """
    processor, known = image_processor(), list(dict.fromkeys(pictures))
    shown = processor([Image.open(io.BytesIO(png)).convert("RGB") for png in known], return_tensors="np")
    pixels_NPC = torch.from_numpy(np.asarray(shown["pixel_values"])).unflatten(0, (len(known), -1))
    grids_N3 = torch.from_numpy(np.asarray(shown["image_grid_thw"]))
    place = {png: number for number, png in enumerate(known)}
    places_N = torch.tensor([place[png] for png in pictures])

    def inputs(rows_B: Tensor, ids_BL: Tensor) -> dict[str, Tensor]:
        chosen_B = places_N[rows_B]
        return {
            "pixel_values": pixels_NPC[chosen_B].flatten(0, 1),
            "image_grid_thw": grids_N3[chosen_B],
            "mm_token_type_ids": (ids_BL == image_token).long(),
        }

    return inputs
