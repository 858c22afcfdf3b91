"""Memory of processes that live as long as a run: Python's garbage collection, glibc's allocator, what they hold."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Settings of glibc's allocator, for processes whose tensors are on a CPU. Without glibc they do nothing.

MMAP_OTHERWISE = 2**25  # the value that glibc's own, dynamic threshold reaches; it takes no higher one
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_KEPT_BYTES = 2**31 - 1  # the largest value that `mallopt` takes
_STEP_BYTES = 2**26


def map_blocks_from(size: int) -> None:
    """Map each block of at least `size` bytes separately, and return free memory to the system now.

    Blocks that are allocated and freed in different orders would otherwise leave gaps in the heap, which then grows.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, size)
        libc.malloc_trim(0)


def map_large_blocks(size: int) -> None:
    """Map each block of at least `size` bytes separately for good, and keep no more than two of that size when freed.

    By default glibc raises both limits to the largest block ever freed, up to 32 MiB and 64 MiB.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, size)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * size)


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation instead of returning it to the system.

    The system clears each page that it gives, and every training step allocates the same activations. With glibc's
    defaults this takes a sixth of an update of 7,000 tokens at hidden size 128, and more if several processes do it at
    once.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_OTHERWISE)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TOP_PAD, _STEP_BYTES)


def return_freed_memory() -> None:
    """Return currently free memory to the system, even where `keep_freed_memory` keeps memory that is freed later."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def use_huge_pages() -> None:
    """Let torch ask for huge pages for the tensors of this process from 2 MiB on. Call it before the first tensor.

    The system clears each page that it gives. A parked trainer gives back all of its state in each step. Huge pages are
    512 times fewer, and their first use costs a third of the time. Linux gives them on request where
    /sys/kernel/mm/transparent_hugepage/enabled says `madvise` or `always`.
    """
    import torch

    name = "THP_MEM_ALLOC_ENABLE"  # torch reads it once, at its first allocation (c10/core/impl/alloc_cpu.cpp)
    given = os.environ.get(name)
    os.environ.setdefault(name, "1")
    torch.empty(1)
    if given is None:
        del os.environ[name]  # an engine's cache would take whole pages of which it uses a part


def anonymous_bytes(process: int | str = "self") -> int:
    """Return the bytes of a process's private memory: neither of a file nor shared by mapping one."""
    with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) * 1024


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


# Requests and groups in flight are many objects that stay for long: after every 700 new ones, Python's default, they
# would be visited again and again, which took a third of the controller's time with 10,000 trajectories in flight.
_YOUNG_OBJECTS = 50_000
_FEW_OBJECTS, _NEVER = 500, 1_000_000_000
_PYTHONS_OWN = gc.get_threshold()


def begin_start() -> None:
    """Make collections rare while a process starts, until `end_start` or another setting of the collector.

    Imports make a million objects that all stay. With Python's own thresholds, collections would visit them repeatedly.
    """
    gc.set_threshold(_YOUNG_OBJECTS)


def end_start() -> None:
    """Let Python collect as usual, except the objects that exist now (see `exempt_present_objects`)."""
    exempt_present_objects()
    gc.set_threshold(*_PYTHONS_OWN)


def exempt_present_objects() -> None:
    """Take all objects that exist now out of later collections. To be called when a process has started.

    They are mostly imported modules, and stay until the end. A collection that visits them stops a process for 0.3 s.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Make collections rare in a process with many small objects in flight. Not for one whose tensors are in cycles."""
    gc.set_threshold(_YOUNG_OBJECTS)


def collect_young_objects() -> None:
    """Make collections short in a process whose event loop runs thousands of agent loops.

    Their requests, responses and states are lists of hundreds of tokens. A collection visits each token, mostly outside
    the caches: a collection of 5,000 new objects stopped such a process for 0.1 s, one of all objects for 0.4 s. Here
    only new objects are visited, a few at a time. Cycles of older ones stay until a call of `gc.collect`; the loops
    make less than one such object per trajectory.
    """
    gc.set_threshold(_FEW_OBJECTS, _NEVER, _NEVER)


def collect_for_loops(*, shipped: bool) -> None:
    """Choose between both for a process that runs many agent loops. `shipped`: only megarl's own loops.

    These make almost no cycles. Objects of other loops, such as HTTP clients, may be in cycles that outlive a
    collection of young objects, and would stay.
    """
    (collect_young_objects if shipped else collect_rarely)()


@contextmanager
def collections_paused(*, freeze: bool = False) -> Iterator[None]:
    """Disable collections in the block, for work at a start that takes less time than a visit of all objects.

    `freeze`: later collections leave out all objects that exist at its end.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if enabled:
            gc.enable()
