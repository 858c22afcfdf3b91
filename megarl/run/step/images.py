"""The pixels of a step: patches of the images in its rows, made from their files when a micro-batch needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.config.schema import VisionConfig
from megarl.queue.images import ImageRef

if TYPE_CHECKING:
    from megarl.models.hf.image_patches import ImageProcessor


class StepImages:
    """Reads the images of each batch; a bounded number of the latest patches is kept."""

    def __init__(self, model: Path, vision: VisionConfig) -> None:
        """`model`: the directory of the policy, whose processor the engines have too."""
        self._model, self._vision = model, vision
        self._processor: ImageProcessor | None = None

    def reader(self, files: Mapping[str, bytes]) -> Callable[[ImageRef], Tensor]:
        """Return the function that returns the patches of an image of a batch, uint8 [height * width * merge**2, C].

        `files`: those of the batch by hash. The function raises KeyError for an image that is none of them, and
        ImageError if a file is not the image's.
        """
        if self._processor is None:  # a run without images does not import these
            from megarl.models.hf.image_patches import ImageProcessor

            self._processor = ImageProcessor(self._model, self._vision.max_pixels)
        processor = self._processor
        return lambda image: torch.from_numpy(processor.patches_of(image, files[image.hash]))
