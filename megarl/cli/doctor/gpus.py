"""Findings about GPUs: whether the driver and NCCL match torch, and whether this machine's GPUs reach each other."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.cli.doctor.packages import installed_version
from megarl.cli.doctor.report import Finding
from megarl.common.values import GIB
from megarl.config.derived.hardware import local_gpus

# The oldest driver branch that runs programs of a CUDA major version (NVIDIA, "CUDA Compatibility", table 1).
OLDEST_DRIVER = {11: "450", 12: "525", 13: "580"}


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: its version, and the newest CUDA version (major, minor) that it supports."""

    version: str
    cuda: tuple[int, int]


def find_driver() -> Driver | None:
    """Return the driver as NVML describes it; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        name, cuda = ctypes.create_string_buffer(80), ctypes.c_int()
        nvml.nvmlSystemGetDriverVersion(name, ctypes.c_uint(len(name)))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        return Driver(name.value.decode(), (cuda.value // 1000, cuda.value % 1000 // 10))
    finally:
        nvml.nvmlShutdown()


def torch_findings(cuda: bool) -> Iterator[Finding]:
    """Yield findings about the device path, GPUs, driver, NCCL, peer access and gloo."""
    import torch

    yield Finding("ok", "device path", "CUDA, NCCL" if cuda else "CPU: gloo, emulated CUDA calls")
    gpus, driver = local_gpus(), find_driver()
    if gpus and not cuda:
        why = "this torch has no CUDA" if torch.version.cuda is None else "CUDA does not initialize"
        yield Finding("warn", "GPUs", f"{len(gpus)} x {gpus[0].name}, but {why}", "run make setup-gpu")
    elif gpus:
        yield Finding("ok", "GPUs", f"{len(gpus)} x {gpus[0].name}, {gpus[0].memory / GIB:.0f} GiB each")
    if driver is not None and torch.version.cuda is not None:
        yield driver_finding(driver, torch.version.cuda)
    if cuda:
        available = torch.distributed.is_nccl_available()
        loaded = ".".join(map(str, torch.cuda.nccl.version()[:3])) if available else None
        yield nccl_finding(loaded, installed_version("nvidia-nccl-cu13"))
        count = torch.cuda.device_count()
        can = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
        yield peer_finding(can)
    if not torch.distributed.is_gloo_available():
        yield Finding("fail", "gloo", "missing from this torch", "install the locked torch")


def driver_finding(driver: Driver, torch_cuda: str) -> Finding:
    """Check that `driver` runs programs of torch's CUDA version, for example `13.0`.

    Within a major version an older driver runs newer programs, except for kernels that are compiled at run time.
    """
    major, minor = (int(part) for part in torch_cuda.split(".")[:2])
    supported = ".".join(map(str, driver.cuda))
    detail = f"{driver.version}, up to CUDA {supported}; torch has CUDA {torch_cuda}"
    if driver.cuda[0] < major:
        oldest = OLDEST_DRIVER.get(major, "a newer one")
        return Finding("fail", "driver", detail, f"install driver {oldest} or newer, or CUDA's compatibility package")
    if driver.cuda < (major, minor):
        fix = f"kernels that Triton or nvcc compile at run time may not load: a driver for CUDA {torch_cuda} is safer"
        return Finding("warn", "driver", detail, fix)
    return Finding("ok", "driver", detail)


def nccl_finding(loaded: str | None, packaged: str | None) -> Finding:
    """Check that torch loaded NCCL from the package that it requires. Both are versions, or None if missing."""
    if loaded is None:
        return Finding("fail", "NCCL", "missing from this torch", "run make setup-gpu")
    if packaged is not None and packaged.split(".")[:3] != loaded.split("."):
        fix = "another libnccl comes first: remove it from LD_LIBRARY_PATH and LD_PRELOAD, on all nodes"
        return Finding("warn", "NCCL", f"{loaded} is loaded, torch's package is nvidia-nccl-cu13 {packaged}", fix)
    return Finding("ok", "NCCL", loaded)


def peer_finding(can_access: Sequence[Sequence[bool]]) -> Finding:
    """Check that every GPU can read the memory of all others; `can_access[i][j]`: GPU i can read that of GPU j."""
    count = len(can_access)
    if count < 2:
        return Finding("ok", "peer access", f"{count} GPU: nothing to reach")
    closed = [f"{i}-{j}" for i in range(count) for j in range(count) if not can_access[i][j]]
    if not closed:
        return Finding("ok", "peer access", f"all {count} GPUs reach each other")
    fix = (
        "NCCL copies through host memory, several times slower: switch off the PCIe ACS of the bridges (or the IOMMU), "
        "give a virtual machine or container all GPUs of one NVLink domain; nvidia-smi topo -m shows the links"
    )
    return Finding("warn", "peer access", f"none for GPUs {', '.join(closed)}", fix)
