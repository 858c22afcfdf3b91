"""Settings of the allocator: what is freed is kept, or returned. Page faults are those that the kernel counts."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from megarl.common import malloc

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.ones(2**18 + 2**12 * number) for number in range(8)]  # 1 MiB and more, together 9 MiB
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{setting}
faults()
print(faults())
"""


def _faults(setting: str) -> int:
    """Return the page faults of allocations that are repeated 20 times, after a first round."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setting=setting)], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_is_kept_is_not_cleared_again() -> None:
    pages = 20 * 9 * 2**20 // 4096
    assert _faults("malloc.map_blocks_from(2**20)") > pages / 2
    assert _faults("malloc.keep_freed_memory()") < pages / 20


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_limit_for_mapped_blocks_ends_the_keeping() -> None:
    pages = 20 * 9 * 2**20 // 4096
    assert _faults("malloc.keep_freed_memory(); malloc.map_blocks_from(2**20)") > pages / 2
