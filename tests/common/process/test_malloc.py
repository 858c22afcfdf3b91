"""Settings of the allocator: what is freed is kept, or returned. Page faults are those that the kernel counts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The blocks lie at the end of the heap, with nothing above them: there glibc by itself returns what is freed. Tensors
# would bring small blocks that may stay above them, and then even glibc's defaults keep what lies below.
PROGRAM = """
import ctypes, resource
from megarl.common.process import memory_tuning as malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would be one fault for 512 pages
SIZES = [2**20 + 2**14 * number for number in range(8)]  # 1 MiB and more

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [libc.malloc(size) for size in SIZES]
        for block, size in zip(blocks, SIZES):
            ctypes.memset(block, 1, size)
        for block in reversed(blocks):
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{setting}
faults()
print(faults())
"""
PAGES = 20 * sum(2**20 + 2**14 * number for number in range(8)) // 4096


def _faults(setting: str) -> int:
    """Return the page faults of allocations that are repeated 20 times, after a first round."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    program = [sys.executable, "-c", PROGRAM.format(setting=setting)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True, env=plain)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_is_kept_is_not_cleared_again() -> None:
    assert _faults("") > PAGES / 2, "glibc by itself keeps it, so that the next line would show nothing"
    assert _faults("malloc.keep_freed_memory()") < PAGES / 20


TENSOR = """
import os
from megarl.common.process.memory_tuning import use_huge_pages
{setting}
import torch
tensor = torch.ones(2**26, dtype=torch.uint8)
address = tensor.data_ptr() + 2**25
assert "THP_MEM_ALLOC_ENABLE" not in os.environ, "engines would inherit it"
inside = False
for line in open("/proc/self/smaps"):
    first, _, rest = line.partition("-")
    if rest and set(first) <= set("0123456789abcdef"):
        inside = int(first, 16) <= address < int(rest.split()[0], 16)
    elif inside and line.startswith("VmFlags:"):
        print("hg" in line.split())
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel has no huge pages on request"
)
@pytest.mark.parametrize(("setting", "asked"), [("", "False"), ("use_huge_pages()", "True")])
def test_large_tensors_ask_for_huge_pages(setting: str, asked: str) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("THP_MEM_ALLOC")}
    program = [sys.executable, "-c", TENSOR.format(setting=setting)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True, env=plain)
    assert done.stdout.split() == [asked]
