"""The platform of this process. Call `activate()` before using Megatron-Core; `current()` returns the platform."""

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

EXPANDABLE_SEGMENTS = "expandable_segments:True"
# torch reads the first one that is set; PYTORCH_CUDA_ALLOC_CONF is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prepare(index: int, *, expandable: bool = True) -> None:
    """Make visible GPU `index` the device of this process, with growing memory segments if `expandable`.

    Call it before importing Transformer Engine, which creates a context on the current device: every rank of a node
    would leave one on GPU 0. Megatron-Core compiles a few small functions with torch.compile (jit.py), for which every
    rank would start up to 32 processes: it gets none, unless the user's environment says otherwise.
    """
    torch.cuda.set_device(index)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # before torch._inductor is imported
    if expandable:
        use_expandable_segments()


def use_expandable_segments() -> None:
    """Make torch's allocator grow its segments instead of allocating new ones, unless the user has configured it.

    Micro-batches of varying lengths and an offloaded reference model fragment segments of fixed size. The setting
    applies to this process, not to its environment, because the engines, children of rank 0's supervisor, must not
    inherit it: vLLM 0.32 refuses PYTORCH_CUDA_ALLOC_CONF with such segments in an engine with a KV connector, unless
    that uses vLLM's allocator (config/vllm.py, `_verify_kv_transfer_compat`).
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE_SEGMENTS)


def check_transformer_engine() -> None:
    """Import Transformer Engine if it is installed, because Megatron-Core will. Raises InstallationError on failure.

    Megatron-Core only catches ImportError. Transformer Engine raises FileNotFoundError without its PyTorch extension,
    and OSError if the extension was built for another torch.
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
    """Load cuDNN and NVRTC from the installed packages before Transformer Engine looks for them.

    If there is a CUDA toolkit (CUDA_HOME, /usr/local/cuda, ...), version 2.20.2 (common/__init__.py) loads the
    toolkit's NVRTC, which may be of another CUDA version, and not the parts of cuDNN that its library needs: the import
    then fails.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        for pattern in ("cudnn/lib/libcudnn*.so.*", "cu*/lib/libnvrtc.so.*"):
            for library in sorted(Path(folder).glob(pattern)):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@dataclass(frozen=True)
class Platform:
    """The device of tensors, and the communication backend of the ranks."""

    device: torch.device
    is_cuda: bool
    backend: Literal["nccl", "gloo"]


@functools.cache
def current() -> Platform:
    """Return the process's platform. The first call checks whether torch finds a CUDA device."""
    if torch.cuda.is_available():
        return Platform(torch.device("cuda"), True, "nccl")
    return Platform(torch.device("cpu"), False, "gloo")


def activate(device: int | None = None, *, expandable: bool = True) -> Platform:
    """Make Megatron-Core usable on this platform, patch its known defects, and return the platform. Idempotent.

    `device`: the index of this process's GPU, ignored without CUDA; None leaves the choice to the caller. `expandable`:
    let memory segments grow; other processes cannot map them then. Applies `patches.PATCHES`, sets a directory for
    compiled kernels (`keep_kernels`) and, without CUDA, installs `cpu.EMULATIONS`. Imports Megatron-Core, which takes a
    few seconds. Raises InstallationError if its version is not supported or Transformer Engine is incomplete.
    """
    platform = current()
    if platform.is_cuda and device is not None:
        prepare(device, expandable=expandable)
    _make_megatron_usable()
    return platform


@functools.cache
def _make_megatron_usable() -> None:
    keep_kernels(lambda: make_private_directory() / "tmp")  # removed by a later start
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
