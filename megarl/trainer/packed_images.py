"""The images of a packed micro-batch: where their features go, and the pixels of each distinct image.

Shapes: T packed tokens of this rank, W of all context-parallel ranks, I image tokens among T, P patches, C values per
patch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megarl.config.schema import ModelConfig
from megarl.models.architecture.architecture import VisionTower
from megarl.models.hf.image_patches import ImageProcessor
from megarl.models.megatron.vision_model import ImageBatch
from megarl.queue.images import ImageRef, positions


class ImagePacker:
    """Packs images for a model with a vision tower, and makes their patches as the engines do."""

    def __init__(self, model: ModelConfig, tower: VisionTower) -> None:
        self.merge, self._patch_size = tower.merge, tower.patch_size
        self._model = model
        self._processor: ImageProcessor | None = None
        self.files: Mapping[str, bytes] = {}  # of the images that can be read, by hash

    def positions(self, sequences: Sequence[tuple[int, Sequence[ImageRef]]], dummy: int) -> Tensor:
        """Return positions [3, 1, W] of sequences (length and images each), then of `dummy` tokens of padding."""
        parts = [positions(length, images) for length, images in [*sequences, (dummy, ())]]
        return torch.cat([torch.from_numpy(part) for part in parts], 1)[:, None]

    def pack(self, images: Sequence[Sequence[ImageRef]], starts: Sequence[int], places_W: Tensor) -> ImageBatch | None:
        """Return the images that this rank has tokens of; None if there are none.

        `starts`: of their sequences in W; `places_W`: the row of T of each token, -1 on other ranks.
        """
        distinct: dict[str, ImageRef] = {}
        first: dict[str, int] = {}  # the row of an image's first feature
        rows, features, count = [], [], 0
        for start, refs in zip(starts, images, strict=False):
            for ref in refs:
                places = places_W[start + ref.offset : start + ref.end]
                if not (own := places >= 0).any():
                    continue
                if ref.hash not in distinct:
                    distinct[ref.hash], first[ref.hash] = ref, count
                    count += ref.tokens
                same = distinct[ref.hash]
                if (same.height, same.width) != (ref.height, ref.width):
                    raise ValueError(f"{ref} and {same} are one image with two sizes")
                rows.append(places[own])
                features.append(torch.arange(ref.tokens)[own] + first[ref.hash])
        if not distinct:
            return None
        shown = list(distinct.values())
        return ImageBatch(
            tuple((ref.hash, ref.height, ref.width) for ref in shown),
            torch.tensor([[1, ref.height * self.merge, ref.width * self.merge] for ref in shown]),
            torch.cat(rows),
            torch.cat(features),
            lambda numbers: self._patches([shown[number] for number in numbers]),
        )

    def read(self, image: ImageRef) -> Tensor:
        """Return an image's patches in the processor's order, uint8 [height * width * merge**2, C] on the CPU.

        Raises KeyError for an image without a file, ImageError if the file is another image's.
        """
        if self._processor is None:
            self._processor = ImageProcessor(self._model.path, self._model.vision.max_pixels)
        return torch.from_numpy(self._processor.patches_of(image, self.files[image.hash]))

    def _patches(self, images: Sequence[ImageRef]) -> Tensor:
        """Return the images' patches, concatenated: uint8 [P, C]. Raises ValueError for a wrong shape."""
        parts = [self.read(image) for image in images]
        for image, part in zip(images, parts, strict=True):
            wanted = (image.tokens * self.merge**2, self._patch_size)
            if tuple(part.shape) != wanted or part.dtype != torch.uint8:
                raise ValueError(f"{image}: its patches are {part.dtype} {list(part.shape)}, not uint8 {list(wanted)}")
        return torch.cat(parts)
