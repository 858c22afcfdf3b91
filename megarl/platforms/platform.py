"""The platform of this process. Call `activate()` before Megatron-Core is used; read the platform by `current()`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Platform:
    """The device of tensors, and the backend by which ranks communicate."""

    device: torch.device
    is_cuda: bool
    backend: Literal["nccl", "gloo"]


@functools.cache
def current() -> Platform:
    """Return the process's platform, which depends on whether torch finds a CUDA device at the first call."""
    if torch.cuda.is_available():
        return Platform(torch.device("cuda"), True, "nccl")
    return Platform(torch.device("cpu"), False, "gloo")


@functools.cache
def activate() -> Platform:
    """Make Megatron-Core usable on this platform, patch its known defects, and return the platform. Idempotent.

    Without CUDA this installs `cpu.EMULATIONS`; on all platforms `patches.PATCHES`, for defects of Megatron-Core. It
    imports Megatron-Core, which takes a few seconds.
    """
    platform = current()
    if not platform.is_cuda:
        from megarl.platforms import cpu

        cpu.install()
    from megarl.platforms import patches

    patches.apply()
    return platform
