"""The memory that objects hold, and the growth of a number over a run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

# What all objects share: it belongs to no run.
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def held_bytes(*roots: Any) -> int:
    """Return the bytes of all objects that can be reached from `roots`, each counted once."""
    seen, open_objects, total = set(), list(roots), 0
    while open_objects:
        current = open_objects.pop()
        if id(current) in seen or isinstance(current, _SHARED):
            continue
        seen.add(id(current))
        total += sys.getsizeof(current)
        open_objects += gc.get_referents(current)
    return total


def growth_per_step(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of the line through (steps, values) with the least squares."""
    mean_step, mean_value = sum(steps) / len(steps), sum(values) / len(values)
    products = sum((step - mean_step) * (value - mean_value) for step, value in zip(steps, values, strict=True))
    return products / sum((step - mean_step) ** 2 for step in steps)
