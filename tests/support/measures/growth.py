"""The memory that objects hold, and the growth of a number over a run, in a process that no other test has used."""

import gc
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

MEASURE_S = 600.0

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


def slopes_over(
    steps: int, every: int, take_step: Callable[[int], object], sizes: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Take `steps` steps, measure `sizes` at intervals, and return the growth of each per step.

    The first two measurements are left out: the first steps fill what has a fixed size.
    """
    found: list[dict[str, float]] = []
    for step in range(steps):
        take_step(step)
        if step % every == 0:
            found.append(sizes())
    later = found[2:]
    at = [number * every for number in range(len(later))]
    return {name: growth_per_step(at, [each[name] for each in later]) for name in later[0]}


def in_own_process(measure: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """Return what a function of a test module measures in a new process.

    Threads that earlier tests have left in this one may open a descriptor at any time.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(measure, *arguments).result(MEASURE_S)
