"""Frozen models next to the policy. Their weights stay on the device, or in host memory between passes.

Tensors may have any shape.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megarl import platforms
from megarl.checkpoint.format.load_weights import load_weights
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.megatron.build_model import Precision, build_model, transformer_config
from megarl.models.megatron.layout import Layout
from megarl.models.megatron.shards import unwrap
from megarl.trainer.logprobs import return_hidden_states
from megarl.trainer.optimizer import precision_wrap

WeightsPlace = Literal["gpu", "cpu_offload"]


class Placement:
    """Keeps the tensors of frozen modules on `device`, either always (`gpu`) or only inside `resident()`.

    `uploads`: whether each `resident()` copies them to the device.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        device: torch.device,
        placement: WeightsPlace,
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
        """Hold the tensors on the device inside the context; then return to host memory, unchanged."""
        for tensor, home in zip(self._tensors, self._home, strict=True):
            tensor.data = self._upload(home)
        try:
            yield
        finally:
            for tensor, home in zip(self._tensors, self._home, strict=True):
                tensor.data = home

    def _upload(self, home: Tensor) -> Tensor:
        return home.to(self._device, non_blocking=True)


class FrozenModel:
    """A model that only computes log-probs, in the policy's layout, with the weights and `info` of `path`.

    It may have another size than the policy.
    """

    def __init__(
        self, info: ModelInfo, layout: Layout, path: Path, placement: WeightsPlace, precision: Precision,
        fields: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """`fields`: of Megatron's TransformerConfig, from `transformer_fields`."""
        self.info = info
        tf_config = transformer_config(info, layout, precision, fields, initialize=False)
        chunks = build_model(info, tf_config, layout)
        load_weights(chunks, info, path)
        for chunk in chunks:
            chunk.requires_grad_(False)
            return_hidden_states(chunk)
        self.chunks = [precision_wrap(chunk) for chunk in chunks]
        self.placement = Placement(self.chunks, platforms.current().device, placement)


class ReferenceModel(FrozenModel):
    """The policy's architecture and layout, with other weights.

    `refreshed`: the step after which it last took the policy's weights; 0 = never.
    """

    refreshed = 0

    @torch.no_grad()
    def take_weights(self, chunks: Sequence[torch.nn.Module], steps: int) -> None:
        """Copy the policy's `chunks`, as of `steps` steps. Every rank copies its own shards."""
        for own, other in zip(self.chunks, chunks, strict=True):
            tensors = zip(_tensors(own), _tensors(other), strict=True)
            for (name, target), (source_name, source) in tensors:
                if name != source_name or target.shape != source.shape or target.dtype != source.dtype:
                    raise ValueError(f"the reference model has {name}, where the policy has {source_name}")
                target.data.copy_(source.data)
        self.refreshed = steps


def _tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of a chunk's parameters and buffers, under any wrappers."""
    model = unwrap(chunk)
    yield from model.named_parameters()
    yield from model.named_buffers()
