"""Splits a conversion into items of bounded size, and packs these into units, each written and resumed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megarl.common.values import MIB

ITEM_BYTES = 128 * MIB  # largest size of an item; limits the memory of a worker
UNIT_BYTES = (32 * MIB, 1024 * MIB)  # smallest and largest size of a unit
UNITS = 48  # number of units, if their size is within these limits

T = TypeVar("T")


@dataclass(frozen=True)
class Item(Generic[T]):
    """Rows [start, stop) of the tensor `what`; they are `nbytes` bytes of output."""

    what: T
    start: int
    stop: int
    nbytes: int


def split(what: T, shape: Sequence[int], dtype: torch.dtype, limit: int = ITEM_BYTES) -> Iterator[Item[T]]:
    """Yield a tensor's rows (axis 0) in items of at most `limit` bytes, but at least one row each."""
    row = dtype.itemsize * torch.Size(shape[1:]).numel()
    rows = shape[0] if shape else 1
    step = max(1, limit // row) if row else max(1, rows)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Item(what, start, stop, (stop - start) * row)


def pack(
    items: Iterable[Item[T]], limit: int, apart: Callable[[Item[T]], object] = lambda _: None
) -> list[list[Item[T]]]:
    """Pack items, in order, into units of at most `limit` bytes (or one larger item).

    An item whose `apart` value differs from that of the item before it begins another unit.
    """
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
    """Return the size of a unit for `total` bytes. It depends on nothing else: any number of workers can resume."""
    low, high = UNIT_BYTES
    return min(max(total // UNITS, low), high)
