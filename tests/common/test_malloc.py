"""Settings of the allocator: what is freed is kept, or returned. Page faults are those that the kernel counts."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, sys
import torch
from megarl.common import malloc

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.ones(2**18 + 2**12 * number) for number in range(8)]  # 1 MiB and more, together 9 MiB
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for setting in sys.argv[1:]:  # each in a process of its own, as all of a process have the same allocator
    read, written = os.pipe()
    if (pid := os.fork()) == 0:
        exec(setting)
        faults()
        os.write(written, str(faults()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    print(int(os.read(read, 100)))
"""
KEPT, MAPPED = "malloc.keep_freed_memory()", "malloc.map_blocks_from(2**20)"


def _faults(*settings: str) -> list[int]:
    """Return for each setting the page faults of allocations that are repeated 20 times, after a first round."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *settings], capture_output=True, text=True, timeout=120, check=True
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_is_kept_is_not_cleared_again_unless_blocks_are_mapped() -> None:
    pages = 20 * 9 * 2**20 // 4096
    mapped, kept, both = _faults(MAPPED, KEPT, f"{KEPT}; {MAPPED}")
    assert mapped > pages / 2 and kept < pages / 20
    assert both > pages / 2, "a limit for mapped blocks ends the keeping"
