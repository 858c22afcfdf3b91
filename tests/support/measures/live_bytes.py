"""Counts the bytes of the tensors that live at the same time, as a memory allocator would."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Peak bytes of the storages that operations create inside the context, each counted while it lives.

    Storages that existed before do not count, nor does the memory that a single operation uses inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._count(tensor, created=False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._count(tensor, created=True)
        return result

    def _count(self, tensor: torch.Tensor, *, created: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes() if created else 0
        if key in self._known:
            return

        def released(_: object) -> None:
            self._now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, released)
        self._now += size
        self.peak = max(self.peak, self._now)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
