"""The images of a packed micro-batch: where their features go, and the pixels of each distinct image.

Shapes: T packed tokens, I image tokens among them, P patches, C values per patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.megatron.vision_model import ImageBatch
from megarl.queue.images import ImageRef, positions

# Returns an image's patches in the order of the model's processor, uint8 [height * width * merge², C] on the CPU.
ReadPatches = Callable[[ImageRef], Tensor]


@dataclass(frozen=True)
class ImagePacker:
    """Packs images for a tower that merges `merge` x `merge` patches of `patch_size` values into a token."""

    merge: int
    patch_size: int
    read: ReadPatches

    def positions(self, sequences: Sequence[tuple[int, Sequence[ImageRef]]], dummy: int) -> Tensor:
        """Return positions [3, 1, T] of sequences (length and images each), then of `dummy` tokens of padding."""
        parts = [positions(length, images) for length, images in [*sequences, (dummy, ())]]
        return torch.cat([torch.from_numpy(part) for part in parts], 1)[:, None]

    def pack(self, images: Sequence[Sequence[ImageRef]], starts: Sequence[int]) -> ImageBatch | None:
        """Return the images of sequences that start at `starts` in T; None if there are none."""
        distinct: dict[str, ImageRef] = {}
        first: dict[str, int] = {}  # the row of an image's first feature
        rows, features, count = [], [], 0
        for start, refs in zip(starts, images, strict=False):
            for ref in refs:
                if ref.hash not in distinct:
                    distinct[ref.hash], first[ref.hash] = ref, count
                    count += ref.tokens
                same = distinct[ref.hash]
                if (same.height, same.width) != (ref.height, ref.width):
                    raise ValueError(f"{ref} and {same} are one image with two sizes")
                rows.append(torch.arange(start + ref.offset, start + ref.end))
                features.append(torch.arange(ref.tokens) + first[ref.hash])
        if not distinct:
            return None
        grids = [[1, ref.height * self.merge, ref.width * self.merge] for ref in distinct.values()]
        return ImageBatch(
            torch.tensor(grids), torch.cat(rows), torch.cat(features), lambda: self._patches(list(distinct.values()))
        )

    def _patches(self, images: Sequence[ImageRef]) -> Tensor:
        """Return the images' patches, concatenated: uint8 [P, C]. Raises ValueError for a wrong shape."""
        parts = [self.read(image) for image in images]
        for image, part in zip(images, parts, strict=True):
            wanted = (image.tokens * self.merge**2, self.patch_size)
            if tuple(part.shape) != wanted or part.dtype != torch.uint8:
                raise ValueError(f"{image}: its patches are {part.dtype} {list(part.shape)}, not uint8 {list(wanted)}")
        return torch.cat(parts)
