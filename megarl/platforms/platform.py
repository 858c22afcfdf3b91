"""The platform of this process. Call `activate()` before Megatron-Core is used; read the platform by `current()`."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megarl.common import megatron_versions
from megarl.common.errors import InstallationError
from megarl.common.rundir.private_directory import keep_kernels, make_private_directory

# The settings of a process with a GPU before Megatron-Core is imported: its device, and how torch allocates memory.

EXPANDABLE_SEGMENTS = "expandable_segments:True"
# torch reads the first of these that is set; PYTORCH_CUDA_ALLOC_CONF is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prepare(index: int, *, expandable: bool = True) -> None:
    """Make GPU `index`, of those this process sees, its device, and let its memory segments grow if `expandable`.

    Call it before Transformer Engine is imported: that creates a context on the current device, so every rank of a
    node would leave one on GPU 0. Megatron-Core compiles a few small functions by torch.compile (jit.py), for which
    every rank would start a pool of up to 32 processes: it gets none, unless the user's environment says otherwise.
    """
    torch.cuda.set_device(index)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # before torch._inductor is imported
    if expandable:
        use_expandable_segments()


def use_expandable_segments() -> None:
    """Make torch's allocator grow its segments instead of allocating new ones, unless the user has configured it.

    Micro-batches of ever new lengths and a reference model that moves in and out leave holes in segments of fixed
    size. The setting is made in this process, not in its environment: the engines, which are children of rank 0's
    supervisor, must not inherit it. vLLM 0.32 refuses PYTORCH_CUDA_ALLOC_CONF with such segments in an engine that has
    a KV connector, unless that uses vLLM's own allocator (config/vllm.py, `_verify_kv_transfer_compat`).
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE_SEGMENTS)


def check_transformer_engine() -> None:
    """Import Transformer Engine, if it is installed, because Megatron-Core will.

    Raises InstallationError if that fails. Megatron-Core catches only ImportError, but without its PyTorch extension
    Transformer Engine raises FileNotFoundError, and with one that was built for another torch OSError.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        _load_packaged_libraries()
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        raise InstallationError(
            "Transformer Engine is installed, but cannot be imported "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Its PyTorch extension is "
            "built on this machine for the installed torch: run `make setup-gpu`, or uninstall transformer-engine to "
            "use Megatron's own, slower modules"
        ) from error


def _load_packaged_libraries() -> None:
    """Load all parts of the installed packages' cuDNN, and their NVRTC, before Transformer Engine looks for them.

    Where it finds a CUDA toolkit (CUDA_HOME, /usr/local/cuda, ...), version 2.20.2 (common/__init__.py) loads the
    toolkit's NVRTC, which compiles its norms and may be of another CUDA, and not the parts of cuDNN that its own
    library needs: its import then fails.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        for pattern in ("cudnn/lib/libcudnn*.so.*", "cu*/lib/libnvrtc.so.*"):
            for library in sorted(Path(folder).glob(pattern)):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


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


def activate(device: int | None = None, *, expandable: bool = True) -> Platform:
    """Make Megatron-Core usable on this platform, patch its known defects, and return the platform. Idempotent.

    `device`: the index of this process's GPU, ignored without CUDA; None leaves the choice to the caller. `expandable`:
    let memory segments grow, which other processes cannot map then. Without CUDA
    this installs `cpu.EMULATIONS`; on all platforms those of `patches.PATCHES` that its version needs, and a directory
    for compiled kernels (`keep_kernels`). It imports Megatron-Core, which takes a few seconds. Raises
    InstallationError if its version is not supported, or if Transformer Engine is installed in part.
    """
    platform = current()
    if platform.is_cuda and device is not None:
        prepare(device, expandable=expandable)
    _make_megatron_usable()
    return platform


@functools.cache
def _make_megatron_usable() -> None:
    keep_kernels(lambda: make_private_directory() / "tmp")  # a later start of the user removes it
    check_transformer_engine()
    if not current().is_cuda:
        from megarl.platforms import cpu

        cpu.install()
    megatron_versions.check_imported()
    from megarl.platforms import patches

    patches.apply()
    if not current().is_cuda:
        from megarl.platforms import cpu_kernels

        cpu_kernels.install()
