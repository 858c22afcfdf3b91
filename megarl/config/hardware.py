"""Lists this machine's GPUs by NVIDIA's management library (NVML), without torch, a process or a CUDA context."""

from __future__ import annotations

import ctypes
import functools
import os
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
    """Return the GPUs that CUDA would see; none without a driver or if CUDA_VISIBLE_DEVICES is empty."""
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
        gpus = tuple(_gpu(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    wanted = [item.strip() for item in visible.split(",") if item.strip() not in ("", "-1")]
    indices = [int(item) if item.isdigit() else 0 for item in wanted]
    return tuple(gpus[index] for index in indices if index < len(gpus))


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    return Gpu(name.value.decode(), int(memory.total))
