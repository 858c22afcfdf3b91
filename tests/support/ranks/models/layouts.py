"""Megatron's parallel state over all ranks of a test world, for as long as one function of a rank needs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megarl.models.megatron.layout import Layout
from megarl.trainer import parallel


def make_layout(**sizes: Any) -> Layout:
    """A layout over all ranks of the world."""
    return Layout(**sizes, world_size=torch.distributed.get_world_size())


@contextmanager
def use_layout(layout: Layout, seed: int = 1) -> Iterator[Layout]:
    """Megatron's process groups and random states for `layout`, destroyed at the end: the next layout is another."""
    parallel.initialize(layout, seed=seed, timeout_s=60)
    try:
        yield layout
    finally:
        parallel.destroy()
