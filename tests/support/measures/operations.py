"""Counts the torch operations of a piece of code, and the memory that they allocate."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountOperations(TorchDispatchMode):
    """`operations`: all that reach the dispatcher, views included; `peak_bytes`: of storages that exist at one time.

    Only storages are counted that an operation inside the block returned and that it did not get as an argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.peak_bytes = 0
        self._users: dict[int, int] = {}  # tensors by the address of their storage
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        known = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._add(tensor, known)
        return result

    def _add(self, tensor: torch.Tensor, known: set[int]) -> None:
        address = _address(tensor)
        if address in known and address not in self._users:
            return  # an argument that was there before
        if address not in self._users:
            self._bytes += tensor.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._users[address] = self._users.get(address, 0) + 1
        weakref.finalize(tensor, self._remove, address, tensor.untyped_storage().nbytes())

    def _remove(self, address: int, nbytes: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self._bytes -= nbytes


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
