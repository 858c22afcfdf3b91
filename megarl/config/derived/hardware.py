"""Lists this machine's GPUs through NVIDIA's management library (NVML), without torch, a process or a CUDA context."""

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine; `memory` is in bytes."""

    name: str
    memory: int


class _Memory(ctypes.Structure):
    """NVML's nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@functools.cache
def local_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would see; () without a driver or if CUDA_VISIBLE_DEVICES is empty."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        return visible_gpus(nvml, count.value, os.environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        nvml.nvmlShutdown()


def visible_gpus(nvml: ctypes.CDLL, count: int, visible: str | None) -> tuple[Gpu, ...]:
    """Return which of `count` GPUs CUDA_VISIBLE_DEVICES=`visible` selects, by index, UUID or prefix of a UUID.

    Like CUDA, it ignores everything after the first invalid entry. A part of a GPU (MIG) has its own memory.
    """
    handles = [_handle(nvml.nvmlDeviceGetHandleByIndex_v2, index) for index in range(count)]
    if visible is None:
        return tuple(_gpu(nvml, handle) for handle in handles if handle is not None)
    found = []
    for item in (each.strip() for each in visible.split(",")):
        handle = _named(nvml, handles, item)
        if handle is None:
            break
        found.append(_gpu(nvml, handle))
    return tuple(found)


def _named(nvml: ctypes.CDLL, handles: list[ctypes.c_void_p | None], item: str) -> ctypes.c_void_p | None:
    """Return the GPU that one entry of CUDA_VISIBLE_DEVICES names, or None."""
    if item.isdecimal():
        return handles[int(item)] if int(item) < len(handles) else None
    if not item.startswith(("GPU-", "MIG-")):
        return None
    if (exact := _handle(nvml.nvmlDeviceGetHandleByUUID, item.encode())) is not None:
        return exact
    begin = [each for each in handles if each is not None and _uuid(nvml, each).startswith(item)]
    return begin[0] if len(begin) == 1 else None


def _handle(function: Callable[..., int], key: object) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    return handle if function(key, ctypes.byref(handle)) == 0 else None


def _uuid(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    uuid = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid)))
    return uuid.value.decode()


def _gpu(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Gpu:
    memory, name = _Memory(), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    return Gpu(name.value.decode(), int(memory.total))
