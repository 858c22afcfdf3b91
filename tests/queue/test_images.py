"""Images by their places: positions equal those of transformers, whatever ids the text has."""

from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.queue.images import ImageRef, positions

IMAGE, TEXT = 9, 1
SIDE = st.integers(1, 6)
# The text before each image (one token at least, because transformers joins adjacent images), and what follows them.
LAYOUTS = st.tuples(st.lists(st.tuples(st.integers(1, 5), SIDE, SIDE), max_size=4), st.integers(0, 5))


def laid_out(parts: list[tuple[int, int, int]], last: int) -> tuple[list[int], list[ImageRef]]:
    """Return the ids of a sequence and its images."""
    ids: list[int] = []
    images = []
    for text, height, width in parts:
        ids += [TEXT] * text
        images.append(ImageRef("", len(ids), height, width))
        ids += [IMAGE] * (height * width)
    return ids + [TEXT] * last, images


def from_transformers(family: str, ids: list[int], images: list[ImageRef]) -> np.ndarray:
    """Return the positions that the model class of `family` computes, int64 [3, T]."""
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    model: Any = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}[family]
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    self = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    self.get_vision_position_ids = MethodType(model.get_vision_position_ids, self)
    tokens = torch.tensor([ids])
    grids = torch.tensor([[1, 2 * each.height, 2 * each.width] for each in images]) if images else None
    return model.get_rope_index(self, tokens, (tokens == IMAGE).int(), image_grid_thw=grids)[0][:, 0].numpy()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@settings(deadline=None, max_examples=60)
@given(LAYOUTS)
def test_positions_equal_those_of_transformers(family: str, layout: tuple[list[tuple[int, int, int]], int]) -> None:
    ids, images = laid_out(*layout)
    if not ids:
        return
    got = positions(len(ids), images)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, from_transformers(family, ids, images))


def test_text_alone_counts_up() -> None:
    np.testing.assert_array_equal(positions(4, []), [[0, 1, 2, 3]] * 3)
    assert positions(0, []).shape == (3, 0)


def test_adjacent_images_are_two() -> None:
    got = positions(7, [ImageRef("a", 0, 1, 2), ImageRef("b", 2, 2, 2)])
    np.testing.assert_array_equal(got, [[0, 0, 2, 2, 2, 2, 4], [0, 0, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]])


@pytest.mark.parametrize(
    "images",
    [
        [ImageRef("a", 3, 2, 2)],
        [ImageRef("a", 0, 2, 2), ImageRef("b", 3, 1, 1)],
        [ImageRef("b", 4, 1, 1), ImageRef("a", 0, 2, 2)],
        [ImageRef("a", 0, 0, 2)],
    ],
)
def test_images_that_do_not_fit_are_refused(images: list[ImageRef]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        positions(6, images)
