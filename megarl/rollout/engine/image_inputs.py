"""vLLM's input for a prompt with images: exact token ids, and the same patches as the trainer's.

Each image comes with its place and its hash, so vLLM expands nothing, and a sampled image token is text. Patches are
normalised here: vLLM's module for that holds its constants as weights, which an engine with random weights lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from megarl.common.errors import RequestFailed
from megarl.models.hf.image_patches import ImageError, ImageProcessor
from megarl.queue.images import ImageRef
from megarl.rollout.engine.messages import GenerateRequest

if TYPE_CHECKING:
    import numpy as np
    import torch


class ImageInputs:
    """Makes vLLM's inputs. Each file is fetched once and turned into patches in another thread."""

    def __init__(self, processor: ImageProcessor) -> None:
        """`processor`: the image processor of the engine's model."""
        self._processor = processor
        self._making: dict[str, asyncio.Future[np.ndarray]] = {}

    async def of(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the input of a request. Raises RequestFailed for an image that cannot be used."""
        patches = [await self._patches(image, file) for image, file in zip(request.images, request.files, strict=True)]
        return self._input(request, patches)

    async def _patches(self, image: ImageRef, file: bytes | Awaitable[bytes]) -> np.ndarray:
        """Return the patches of an image; the requests of a group ask at the same time."""
        if (known := self._processor.known(image.hash)) is not None:
            return known
        if (making := self._making.get(image.hash)) is None:
            making = self._making[image.hash] = asyncio.ensure_future(self._make(image, file))
            making.add_done_callback(lambda _: self._making.pop(image.hash, None))
        return await asyncio.shield(making)

    async def _make(self, image: ImageRef, file: bytes | Awaitable[bytes]) -> np.ndarray:
        content = file if isinstance(file, bytes) else await file
        try:
            return await asyncio.to_thread(self._processor.patches_of, image, content)
        except ImageError as error:
            raise RequestFailed(f"an image of the prompt cannot be used: {error}") from error

    def _normalised(self, patches: np.ndarray) -> torch.Tensor:
        """Return uint8 patches as the tower takes them, fp32 of the same shape."""
        import torch

        mean, std = torch.tensor(self._processor.mean)[:, None], torch.tensor(self._processor.std)[:, None]
        by_channel = torch.from_numpy(patches).view(len(patches), len(mean), -1)
        return ((by_channel / 255 - mean) / std).flatten(1)

    def _input(self, request: GenerateRequest, patches: list[np.ndarray]) -> dict[str, Any]:
        import torch
        from transformers import BatchFeature
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        merge = self._processor.merge
        grids = torch.tensor([[1, each.height * merge, each.width * merge] for each in request.images])
        pixels = torch.cat([self._normalised(each) for each in patches])
        content = BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        items = MultiModalKwargsItems.from_hf_inputs(content, fields)
        places = [PlaceholderRange(offset=each.offset, length=each.tokens) for each in request.images]
        hashes = [each.hash for each in request.images]
        made: dict[str, Any] = mm_input(list(request.prompt_ids), items, {"image": hashes}, {"image": places})
        return made
