"""The platform of this process. Call `activate()` before Megatron-Core is used; read the platform by `current()`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from megarl.common import megatron_versions
from megarl.common.rundir.kernel_cache import keep_kernels
from megarl.common.rundir.private_directory import make_private_directory
from megarl.platforms import cuda


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


def activate(device: int | None = None) -> Platform:
    """Make Megatron-Core usable on this platform, patch its known defects, and return the platform. Idempotent.

    `device`: the index of this process's GPU, ignored without CUDA; None leaves the choice to the caller. Without CUDA
    this installs `cpu.EMULATIONS`; on all platforms those of `patches.PATCHES` that its version needs, and a directory
    for compiled kernels (`keep_kernels`). It imports Megatron-Core, which takes a few seconds. Raises
    InstallationError if its version is not supported, or if Transformer Engine is installed in part.
    """
    platform = current()
    if platform.is_cuda and device is not None:
        cuda.prepare(device)
    _make_megatron_usable()
    return platform


@functools.cache
def _make_megatron_usable() -> None:
    keep_kernels(lambda: make_private_directory() / "tmp")  # a later start of the user removes it
    cuda.check_transformer_engine()
    if not current().is_cuda:
        from megarl.platforms import cpu

        cpu.install()
    megatron_versions.check_imported()
    from megarl.platforms import patches

    patches.apply()
    if not current().is_cuda:
        from megarl.platforms import cpu_kernels

        cpu_kernels.install()
