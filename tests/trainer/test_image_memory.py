"""The pixels of a step: those of earlier steps are dropped."""

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megarl.config.schema import ModelConfig, VisionConfig
from megarl.models.hf import image_patches
from megarl.models.hf.image_patches import ImageProcessor
from megarl.models.hf.read_config import load_info
from megarl.queue.images import ImageRef
from megarl.trainer.packed_images import ImagePacker
from tests.support.models.tiny_vision import make_tiny_vision, picture

KEPT, OF_STEP, WARM, STEPS = 4 << 20, 2, 50, 200
VISION = VisionConfig(max_pixels=356 * 220)


@pytest.mark.slow
def test_memory_is_flat_over_200_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other images in each step, through the packer and a tower: what they need is freed."""
    from transformers import AutoModelForImageTextToText

    monkeypatch.setattr(image_patches, "CACHE_BYTES", KEPT)
    model = make_tiny_vision(tmp_path)
    tower: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).model.visual
    processor, process = ImageProcessor(model, VISION.max_pixels), psutil.Process()
    seen = load_info(model).vision
    assert seen is not None
    packer = ImagePacker(ModelConfig(path=model, vision=VISION), seen)
    since = warm = 0
    for step in range(STEPS):
        contents = [picture(356, 220, OF_STEP * step + number) for number in range(OF_STEP)]
        refs = [ImageRef(processor.hash(each), 1, *processor.size(each)) for each in contents]
        packer.files = {ref.hash: each for ref, each in zip(refs, contents, strict=True)}
        length = 1 + refs[0].tokens
        batch = packer.pack(
            [[each] for each in refs], [length * number for number in range(OF_STEP)], torch.arange(OF_STEP * length)
        )
        assert batch is not None
        pixels = batch.read(range(len(batch.keys)))
        since += pixels.nbytes if step > WARM else 0
        tower(pixels.float() / 255, grid_thw=batch.grids_N3).pooler_output.sum().backward()
        del pixels, batch
        if step == WARM:
            gc.collect()
            warm = process.memory_info().rss
    gc.collect()
    grown = process.memory_info().rss - warm
    print(f"{since / 2**20:.0f} MiB of patches after step {WARM}, and memory has grown by {grown / 2**20:.1f}")
    assert since > 10 * KEPT
    assert grown < since / 2
