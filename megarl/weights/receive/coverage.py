"""Finds weights of a vLLM model that a sync has not written although the model computes with them.

An engine that starts with dummy weights has random numbers in every tensor. A tensor that no sync brings keeps them
without an error: vLLM's loaders do not notice a missing name, and a fused weight counts as loaded after any of its
parts. So this module watches the loaders' operations and counts elements. Tensors may have any shape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMED_AT_MOST = 10


@dataclass
class _Counter:
    """Counts the elements written into one tensor, each part once."""

    tensor: torch.Tensor  # keeps its storage, by whose address it is found
    wanted: int
    written: int = 0
    parts: set[tuple[int, torch.Size, tuple[int, ...]]] = field(default_factory=set)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Counter:
        # Without padding, where vLLM declares it.
        return cls(tensor, getattr(tensor, "weight_loader_numel", tensor.numel()))

    def add(self, target: torch.Tensor) -> None:
        part = int(target.storage_offset()), target.shape, target.stride()
        if part not in self.parts:
            self.parts.add(part)
            self.written += target.numel()


class LoadCoverage:
    """Counts what is written into the weights of a model while `watch()` is entered.

    Make it before a layer-wise reload begins, and call `follow_reload` after that. What no sync brings is not counted:
    buffers that are not saved or hold no floats, and what vLLM computes itself, such as the scales of attention layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[int | str, list[str]] = {}  # tied weights have several names
        self._counters: dict[int | str, list[_Counter]] = {}
        for name, tensor in _loadable(model):
            key = tensor.data_ptr() or name  # a weight of which a kernel keeps only a packed copy has no memory
            self._names.setdefault(key, []).append(name)
            self._counters.setdefault(key, [_Counter.of(tensor)])
        self._live = sorted(
            ((key, counters[0]) for key, counters in self._counters.items() if isinstance(key, int)),
            key=lambda item: item[0],
        )
        self._starts = [start for start, _ in self._live]
        self._meta: dict[int, _Counter] = {}

    def follow_reload(self) -> None:
        """Count in the meta tensors of a layer-wise reload, on which it calls every loader first.

        Its writes to the live weights do not count: it copies each weight whole.
        """
        meta = {name: tensor for name, tensor in _loadable(self._model) if tensor.is_meta}
        for key, names in self._names.items():
            counters = [_Counter.of(meta[name]) for name in names if name in meta]
            if counters:
                self._counters[key] = counters
                self._meta |= {each.tensor.untyped_storage()._cdata: each for each in counters}

    def watch(self) -> TorchDispatchMode:
        """Return a context in which all writes of this thread are counted."""
        return _Watch(self)

    def note(self, func: OpOverload, args: Sequence[Any]) -> None:
        """Count what an operation of the loaders writes with these arguments. Most operations write nothing."""
        if func is torch.ops.aten.copy_.default:
            # A reload copies a weight that it left in place, such as a bias, onto itself.
            if args[0].data_ptr() != args[1].data_ptr() or not args[0].data_ptr():
                self._count(args[0])
        elif func._schema.is_mutable and args:
            for target in tree_leaves(args[0]):
                if isinstance(target, torch.Tensor):
                    self._count(target)

    def _count(self, target: torch.Tensor) -> None:
        if target.is_meta:
            if (counter := self._meta.get(target.untyped_storage()._cdata)) is not None:
                counter.add(target)
            return
        address = target.data_ptr()
        place = bisect_right(self._starts, address) - 1
        if place >= 0 and target.numel():
            _, counter = self._live[place]
            if address < span(counter.tensor)[1]:
                counter.add(target)

    def missing(self) -> list[str]:
        """Return vLLM's names of weights that were not, or not fully, written. Call it before a reload ends."""
        return [
            " = ".join(self._names[key])
            for key, counters in self._counters.items()
            if all(counter.written < counter.wanted for counter in counters)
        ]


def missing_message(missing: list[str]) -> str:
    """Return the error's text for weights that a sync has not brought."""
    more = f" and {len(missing) - NAMED_AT_MOST} more" if len(missing) > NAMED_AT_MOST else ""
    return (
        f"the sync brought {len(missing)} of the engine's weights not at all or only in part: "
        f"{', '.join(missing[:NAMED_AT_MOST])}{more}"
    )


class _Watch(TorchDispatchMode):
    """Counts the targets of operations that change tensors."""

    def __init__(self, coverage: LoadCoverage) -> None:
        super().__init__()
        self._coverage = coverage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # loaders are not compiled; torch would wrap `__torch_dispatch__` in a context manager for that

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        self._coverage.note(func, args)
        return func(*args, **kwargs) if kwargs else func(*args)


def _loadable(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of what a sync must bring; a tied weight once for each module that has it."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS

    weights_unrecorded = SKIP_TENSORS - SKIP_LOAD_TENSORS | {"e_score_correction_bias"}
    for path, module in model.named_modules():
        parameters, buffers = get_layerwise_info(module).restore_metadata  # as the model was built
        names = parameters.keys() | weights_unrecorded
        if not is_deferred_attention_layer(module):
            names |= buffers.keys() - module._non_persistent_buffers_set
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if name in names and tensor is not None and tensor.is_floating_point():
                yield f"{path}.{name}".lstrip("."), tensor


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor, and after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
