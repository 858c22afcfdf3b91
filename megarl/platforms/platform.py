"""`activate()` must run before Megatron-Core is used; everything else asks `current()`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Platform:
    """Where tensors live and how ranks talk."""

    device: torch.device
    is_cuda: bool
    backend: Literal["nccl", "gloo"]


@functools.cache
def current() -> Platform:
    """The process's platform; decided once, by whether torch sees a CUDA device."""
    if torch.cuda.is_available():
        return Platform(torch.device("cuda"), True, "nccl")
    return Platform(torch.device("cpu"), False, "gloo")


@functools.cache
def activate() -> Platform:
    """Make Megatron-Core usable on this platform and patch its known defects. Idempotent.

    Without CUDA this installs `cpu.EMULATIONS`; in both cases `patches.PATCHES` (defects of Megatron-Core
    itself). Imports Megatron-Core, which takes a few seconds.
    """
    platform = current()
    if not platform.is_cuda:
        from megarl.platforms import cpu

        cpu.install()
    from megarl.platforms import patches

    patches.apply()
    return platform
