"""The GPUs that CUDA_VISIBLE_DEVICES leaves, by NVML's answers for a machine with four, one of them divided (MIG)."""

import ctypes
from typing import Any

import pytest

from megarl.config.derived.hardware import Gpu, visible_gpus

UUIDS = ["GPU-aa11-0", "GPU-aa22-0", "GPU-bb33-0", "GPU-cc44-0"]
PART = "MIG-dd55-0"
NAMES = {**{uuid: f"gpu {number}" for number, uuid in enumerate(UUIDS)}, PART: "a part of gpu 3"}
GPUS = [Gpu(name, 1000 + number) for number, name in enumerate(NAMES.values())]
HANDLES = {uuid: 10 + number for number, uuid in enumerate(NAMES)}


class FakeNVML:
    """The calls of libnvidia-ml.so.1; a handle is a number."""

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = HANDLES[UUIDS[index]]
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if (number := HANDLES.get(uuid.decode())) is None:
            return 6  # NVML_ERROR_NOT_FOUND
        handle._obj.value = number
        return 0

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, length: ctypes.c_uint) -> int:
        text.value = self._uuid(handle).encode()
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, text: Any, length: ctypes.c_uint) -> int:
        text.value = NAMES[self._uuid(handle)].encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.total = 1000 + list(HANDLES.values()).index(handle.value or 0)
        return 0

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        return next(uuid for uuid, number in HANDLES.items() if number == handle.value)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-bb33-0", [2]),
        ("GPU-bb, GPU-aa2", [2, 1]),
        ("GPU-aa,1", []),  # the beginning of two UUIDs
        (PART, [4]),
        ("1,GPU-zz,2", [1]),
        ("1,-1,2", [1]),
        ("3,4,2", [3]),
        ("NoDevFiles", []),
    ],
)
def test_indices_and_uuids_as_cuda_reads_them(visible: str | None, expected: list[int]) -> None:
    assert visible_gpus(FakeNVML(), 4, visible) == tuple(GPUS[number] for number in expected)
