"""The frozen reference model, whose weights are on the device, or in host memory between its forward passes.

Its tensors may have any shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from megarl import platforms
from megarl.checkpoint.format.load_weights import load_weights
from megarl.config.megatron_defaults import transformer_fields
from megarl.config.schema import Config
from megarl.models.info import ModelInfo
from megarl.models.layout import Layout
from megarl.models.provider import build_model, transformer_config
from megarl.trainer.head import return_hidden_states
from megarl.trainer.optimizer import precision_wrap


class Placement:
    """Keeps the tensors of frozen modules on `device`, either always (`gpu`) or only inside `resident()`.

    `uploads`: whether each `resident()` brings them to the device.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        device: torch.device,
        placement: Literal["gpu", "cpu_offload"],
    ) -> None:
        self._device = device
        self._tensors: list[Tensor] = []
        self._home: list[Tensor] = []
        self.uploads = placement == "cpu_offload" and device.type != "cpu"
        if self.uploads:
            self._tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
            pin = torch.cuda.is_available()
            for tensor in self._tensors:
                home = torch.empty_like(tensor, device="cpu", pin_memory=pin)
                home.copy_(tensor.data)
                self._home.append(home)
                tensor.data = home

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Hold the tensors on the device inside the context. Afterwards they are in host memory, unchanged."""
        for tensor, home in zip(self._tensors, self._home, strict=True):
            tensor.data = self._upload(home)
        try:
            yield
        finally:
            for tensor, home in zip(self._tensors, self._home, strict=True):
                tensor.data = home

    def _upload(self, home: Tensor) -> Tensor:
        return home.to(self._device, non_blocking=True)


class ReferenceModel:
    """The policy's architecture and layout with the weights of `reference.path` (default: `model.path`)."""

    def __init__(self, config: Config, layout: Layout, info: ModelInfo) -> None:
        tf_config = transformer_config(
            info, layout, config.trainer.precision, transformer_fields(config), initialize=False
        )
        chunks = build_model(info, tf_config, layout)
        load_weights(chunks, info, config.reference.path or config.model.path)
        for chunk in chunks:
            chunk.requires_grad_(False)
            return_hidden_states(chunk)
        self.chunks = [precision_wrap(chunk) for chunk in chunks]
        self.placement = Placement(self.chunks, platforms.current().device, config.reference.placement)
