"""The task of `make vision`: what its pictures show, and that the model learns from what megarl will show it."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.quickstart.bars_task import COLOURS, HELD_OUT, BarsTask
from examples.quickstart.build import build_assets
from examples.quickstart.demonstrations import read_problems
from examples.quickstart.seeing_model import image_inputs, image_prompt
from examples.quickstart.warm_start import WarmStart
from megarl.chat.images import PromptImages
from megarl.chat.tokenize import PromptEncoder, load_tokenizer
from megarl.config.loading.load import load_config
from megarl.data.dataset import load_prompts
from megarl.models.hf.image_patches import ImageProcessor
from megarl.models.hf.read_config import load_info
from tests.support.checkout import ROOT

CONFIG = ROOT / "examples/rl/configs/vision_cpu.yaml"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vision") / "assets"
    assert build_assets(out, 3, WarmStart(steps=1, batch=4, warmup=1, threads=1), BarsTask())
    return out


def test_the_answer_is_the_colour_with_the_longest_or_shortest_bar() -> None:
    data = BarsTask().data(3)
    assert len(data.heldout) == HELD_OUT >= 500
    for row in (*data.heldout[:100], *data.warm_start[:100]):
        pixels = np.asarray(Image.open(io.BytesIO(data.pictures[row["images"]])))
        widths = {name: int((pixels == colour).all(-1).any(0).sum()) for name, colour in COLOURS.items()}
        assert len(set(widths.values())) >= 3
        chosen = max if "longest" in row["problem"] else min
        assert row["answer"] == chosen(widths, key=lambda name: widths[name]), widths


def test_a_picture_is_in_one_set_only(assets: Path) -> None:
    problems = read_problems(assets)
    assert all(name.startswith("pictures/") for names in problems.values() for name in names)
    BarsTask().check(problems)
    problems["train"].append(problems["heldout"][0])
    with pytest.raises(AssertionError, match="heldout and train share 1 problems"):
        BarsTask().check(problems)


def test_the_config_plans_the_model_that_is_made(assets: Path) -> None:
    shape = load_config(CONFIG).model.shape
    assert shape and load_info(ROOT / shape) == load_info(assets / "model")


def test_the_warm_start_sees_what_megarl_shows(assets: Path) -> None:
    """The same token ids, and the same pixels after normalisation."""
    config = load_config(CONFIG, [f"data.path={assets / 'train.jsonl'}"])
    model, tokenizer = assets / "model", load_tokenizer(assets / "model")
    info = load_info(model)
    prompt = load_prompts(assets / "train.jsonl", config.data)[0]
    ids, [image] = PromptEncoder(tokenizer, images=PromptImages.of(model, info, config.model.vision)).encode_images(
        prompt
    )
    question = prompt.row["problem"]
    assert ids == tokenizer(image_prompt(tokenizer, question), add_special_tokens=False)["input_ids"]

    processor = ImageProcessor(model, config.model.vision.max_pixels)
    content = prompt.images[0].read_bytes()
    shown = torch.tensor(processor.patches_of(image, content)).float().unflatten(1, (3, -1)) / 255
    mean, std = (torch.tensor(each)[:, None] for each in (processor.mean, processor.std))
    inputs = image_inputs([content], info.raw["image_token_id"])(torch.tensor([0]), torch.tensor([ids]))
    torch.testing.assert_close(inputs["pixel_values"], ((shown - mean) / std).flatten(1), rtol=0, atol=1e-5)
    assert inputs["mm_token_type_ids"].sum() == image.tokens
