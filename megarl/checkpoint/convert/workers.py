"""Runs units of work in forked processes, which take one unit at a time and report the bytes done.

Workers are forked once, from a process without threads, and are killed when it ends (PR_SET_PDEATHSIG). One worker runs
in the calling process.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Generic, TypeVar

import torch

from megarl.checkpoint.convert.target import from_os_error
from megarl.common.errors import ConversionError
from megarl.common.process.memory_tuning import map_large_blocks
from megarl.common.process.processes import die_with_parent
from megarl.common.values import MIB

T = TypeVar("T")

ReportBytes = Callable[[int], None]  # called with the bytes done since the last call
Work = Callable[[int, ReportBytes], None]  # does the unit with this number
Reports = SimpleQueue[tuple[int, int]]  # a worker's current unit, and the bytes since its last report
_SILENCE_S = 3600.0
_LOOK_S = 0.1  # between two checks of the reports
_MAPPED_BYTES = 4 * MIB  # smaller blocks come from a heap, which is faster


def run_units(units: Sequence[int], work: Work, workers: int, report: ReportBytes) -> None:
    """Do every unit once; the first failure ends all workers.

    Raises what a unit raises, and ConversionError for an OSError, or if a worker dies or reports nothing for an hour.
    """
    # On a heap, small long-lived objects above freed copies of tensors would keep their memory from being returned.
    map_large_blocks(_MAPPED_BYTES)
    if workers <= 1 or len(units) <= 1:
        for number in units:
            _do(work, number, report)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    reports: Reports = context.SimpleQueue()
    pool = ProcessPoolExecutor(min(workers, len(units)), context, _begin, (work, reports, os.getpid()))
    try:
        _await({pool.submit(_do_here, number): number for number in units}, reports, report)
    except BaseException:
        killed = set(multiprocessing.active_children()) - others
        for process in killed:
            process.kill()
        for process in killed:
            process.join(10)  # until then it holds the output's lock
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _await(units: dict[Future[None], int], reports: Reports, report: ReportBytes) -> None:
    """Wait for all units, and forward the workers' reports of bytes."""
    heard: dict[int, float] = {}  # for each unit in progress, when its worker last reported
    while units:
        done = wait(units, _LOOK_S, FIRST_COMPLETED).done
        now = time.monotonic()
        while not reports.empty():
            number, count = reports.get()
            heard[number] = now
            if count:
                report(count)
        for future in done:
            try:
                future.result()
            except BrokenProcessPool:
                raise ConversionError(
                    f"a worker of the units {sorted(heard)} died; the machine may be out of memory: continue with "
                    f"--resume and fewer --workers"
                ) from None
            heard.pop(units.pop(future), None)
        # A worker may hang, e.g. in a file system, while others still report.
        if silent := sorted(number for number, at in heard.items() if now - at >= _SILENCE_S):
            which = f"unit {silent[0]} has" if len(silent) == 1 else f"units {silent} have"
            raise ConversionError(f"{which} made no progress for {_SILENCE_S:.0f} s; continue with --resume")


def _do(work: Work, number: int, report: ReportBytes) -> None:
    try:
        work(number, report)
    except OSError as error:
        raise from_os_error(error, f"writing unit {number}") from error


class _Here:
    """A worker process's work, and where it reports."""

    work: Work
    reports: Reports


def _begin(work: Work, reports: Reports, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _Here.work, _Here.reports = staticmethod(work), reports


def _do_here(number: int) -> None:
    _Here.reports.put((number, 0))
    _do(_Here.work, number, lambda count: _Here.reports.put((number, count)))


# Items of bounded size are packed into units, each written and resumed as a whole.

ITEM_BYTES = 128 * MIB  # largest size of an item; limits the memory of a worker
UNIT_BYTES = (32 * MIB, 1024 * MIB)  # smallest and largest size of a unit
UNITS = 48  # number of units, if their size is within these limits


@dataclass(frozen=True)
class Item(Generic[T]):
    """Rows [start, stop) of the tensor `what`: `nbytes` bytes of output."""

    what: T
    start: int
    stop: int
    nbytes: int


def split(what: T, shape: Sequence[int], dtype: torch.dtype, limit: int = ITEM_BYTES) -> Iterator[Item[T]]:
    """Yield a tensor's rows (axis 0) in items of at most `limit` bytes, but at least one row each."""
    row = dtype.itemsize * torch.Size(shape[1:]).numel()
    rows = shape[0] if shape else 1
    step = max(1, limit // row) if row else max(1, rows)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Item(what, start, stop, (stop - start) * row)


def pack(
    items: Iterable[Item[T]], limit: int, apart: Callable[[Item[T]], object] = lambda _: None
) -> list[list[Item[T]]]:
    """Pack items, in order, into units of at most `limit` bytes (or one larger item).

    An item whose `apart` value differs from the previous item's begins another unit.
    """
    units: list[list[Item[T]]] = []
    size, last = 0, object()
    for item in items:
        if not units or size + item.nbytes > limit or apart(item) != last:
            units.append([])
            size = 0
        units[-1].append(item)
        size, last = size + item.nbytes, apart(item)
    return units


def unit_bytes(total: int) -> int:
    """Return the size of a unit for `total` bytes. It depends on nothing else, so any number of workers can resume."""
    low, high = UNIT_BYTES
    return min(max(total // UNITS, low), high)
