"""A mini-batch with pictures, and what transformers makes of it, one unpadded sequence at a time.

One picture; two of different size; text only; the one picture again behind another.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from megarl.config.schema import Config
from megarl.models.hf.image_patches import ImageProcessor
from megarl.queue.images import ImageRef
from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import TEMPERATURE, make_config, plain_gradients_of
from tests.support.losses.samples import train_sample
from tests.support.models.tiny_vision import picture

PICTURES = {"a": picture(90, 60, 1), "b": picture(130, 170, 2)}
PROMPTS = [("a",), ("a", "b"), (), ("b", "a"), ()]  # the pictures of each sample
MAX_TOKENS = 12


def vision_config(model_dir: Path, **changes: Any) -> Config:
    return make_config(model_dir, **{"trainer__micro_batch_tokens": 160, "algorithm__entropy_coef": 0.0} | changes)


def vision_samples(model_dir: Path) -> list[TrainSample]:
    """The samples, with old and reference log-probs around the model's own."""
    processor, generator = ImageProcessor(model_dir, 64 * 28 * 28), torch.Generator().manual_seed(5)
    model = reference_model(model_dir)
    image_token = model.config.image_token_id
    samples = []
    for number, names in enumerate(PROMPTS):
        ids = torch.randint(1, 250, (3,), generator=generator).tolist()
        images = []
        for name in names:
            height, width = processor.size(PICTURES[name])
            images.append(ImageRef(name, len(ids), height, width))
            ids += [image_token] * (height * width) + torch.randint(1, 250, (2,), generator=generator).tolist()
        response = torch.randint(1, 250, (MAX_TOKENS - number,), generator=generator).tolist()
        mask = torch.rand(len(response), generator=generator) > 0.1
        advantage = float(torch.randn(1, generator=generator))
        made = train_sample(f"0:{number}", ids, response, advantage, loss_mask=mask)
        samples.append(replace(made, images=tuple(images)))
    with torch.no_grad():
        for sample in samples:
            own = plain_logprobs(model, sample, model_dir)
            for name, scale in (("old_logprobs", 0.3), ("reference_logprobs", 0.2)):
                sample.streams[name] = own + scale * torch.randn(own.shape, generator=generator)
    return samples


@cache
def reference_model(model_dir: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)


def patches_of(model_dir: Path) -> dict[str, np.ndarray]:
    """The uint8 patches of the pictures by name."""
    processor = ImageProcessor(model_dir, 64 * 28 * 28)
    return {name: processor.patches(content) for name, content in PICTURES.items()}


def plain_logprobs(model: Any, sample: TrainSample, model_dir: Path) -> torch.Tensor:
    """Log-probs of the response tokens by transformers, with pixels from its own image processor."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    more: dict[str, Any] = {}
    if sample.images:
        more = _pixels(model_dir, [image.hash for image in sample.images])
        more["mm_token_type_ids"] = ids.eq(model.config.image_token_id).int()
    logits = model(input_ids=ids, use_cache=False, **more).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


def _pixels(model_dir: Path, names: Sequence[str]) -> dict[str, Any]:
    import io

    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(str(model_dir))
    return dict(processor([Image.open(io.BytesIO(PICTURES[name])) for name in names], return_tensors="pt"))


def plain_vision_gradients(model_dir: Path, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
    """Gradients of the token-mean clipped PPO + k3 KL by the names of the files."""
    from tests.support.losses.rl_problem import CLIP, KL
    from tests.support.losses.samples import advantage_of

    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        assert sample.loss_mask_R is not None
        logprobs = plain_logprobs(model, sample, model_dir)
        ratio = (logprobs - sample.streams["old_logprobs"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantage_of(sample), clipped * advantage_of(sample))
        difference = sample.streams["reference_logprobs"] - logprobs
        loss = loss + KL * (difference.exp() - difference - 1)
        total = total + (loss * sample.loss_mask_R).sum()
        tokens += int(sample.loss_mask_R.sum())
    return plain_gradients_of(model, total / tokens)
