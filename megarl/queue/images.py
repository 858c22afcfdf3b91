"""The places of a sequence's images among its tokens, and the resulting rotary positions. Pure.

Images are found by the place of their tokens, never by token ids: a model may sample an image token's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

IMAGE_MARK = "<image>"  # marks an image in the text of a message


@dataclass(frozen=True)
class ImageRef:
    """An image whose merged patches, `height` rows of `width` tokens, start at token `offset` of a sequence.

    `hash`: the hex digest of the image's bytes and the processor's settings, which identifies its pixels.
    """

    hash: str
    offset: int
    height: int
    width: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.height * self.width

    @property
    def end(self) -> int:
        """The index of the token after it."""
        return self.offset + self.tokens


def positions(length: int, images: Sequence[ImageRef]) -> np.ndarray:
    """Return the time, height and width positions of a sequence of `length` tokens, int64 [3, length].

    As in Qwen2.5-VL and Qwen3-VL for still images (transformers' `get_rope_index`): text advances all three by one;
    patch (i, j) of an image at position p has (p, p + i, p + j), and the next token p + max(height, width). Raises
    ValueError if images overlap, are out of order or extend beyond the sequence.
    """
    import numpy as np

    out = np.empty((3, length), np.int64)
    token = position = 0
    for image in images:
        if image.offset < token or image.end > length or image.height < 1 or image.width < 1:
            raise ValueError(f"{image} does not fit between tokens {token} and {length} of its sequence")
        text = image.offset - token
        out[:, token : image.offset] = np.arange(position, position + text)
        position += text
        patches = out[:, image.offset : image.end]
        patches[0] = position
        patches[1] = position + np.repeat(np.arange(image.height), image.width)
        patches[2] = position + np.tile(np.arange(image.width), image.height)
        token, position = image.end, position + max(image.height, image.width)
    out[:, token:] = np.arange(position, position + length - token)
    return out
