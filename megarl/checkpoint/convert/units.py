"""How a conversion is cut: into items of bounded size, and those into units, each written and resumed whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

ITEM_BYTES = 128 * 2**20  # rows of a tensor beyond this are an item of their own: bounds what is in memory
UNIT_BYTES = (32 * 2**20, 1024 * 2**20)  # smallest and largest size of a unit
UNITS = 48  # units aimed at, between these sizes

T = TypeVar("T")


@dataclass(frozen=True)
class Item(Generic[T]):
    """Rows [start, stop) of `what`, `nbytes` of output."""

    what: T
    start: int
    stop: int
    nbytes: int


def split(what: T, shape: Sequence[int], dtype: torch.dtype, limit: int = ITEM_BYTES) -> Iterator[Item[T]]:
    """A tensor's rows (axis 0) in items of at most `limit` bytes, at least one row each."""
    row = dtype.itemsize * torch.Size(shape[1:]).numel()
    rows = shape[0] if shape else 1
    step = max(1, limit // row) if row else max(1, rows)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Item(what, start, stop, (stop - start) * row)


def pack(
    items: Iterable[Item[T]], limit: int, apart: Callable[[Item[T]], object] = lambda _: None
) -> list[list[Item[T]]]:
    """Items in order, in units of at most `limit` bytes (or one item); a change of `apart` begins another unit."""
    units: list[list[Item[T]]] = []
    size, last = 0, object()
    for item in items:
        if not units or size + item.nbytes > limit or apart(item) != last:
            units.append([])
            size = 0
        units[-1].append(item)
        size, last = size + item.nbytes, apart(item)
    return units


def unit_bytes(total: int) -> int:
    """The size of units for `total` bytes; it depends on nothing else, so that any number of workers can resume."""
    low, high = UNIT_BYTES
    return min(max(total // UNITS, low), high)


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`: itself where it has it already."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
